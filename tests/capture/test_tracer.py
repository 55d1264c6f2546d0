"""The tracer traces what torchtitan's does, and capturing needs nothing but torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from graphpasses import CapturedStep, capture_train_step
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import trace, update


class Model(nn.Module):
    """A tied weight, dropout, a recomputed block, batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids).float(), ids)


def capture(kind: str, *, optimizer: bool = False, varies: bool = False) -> CapturedStep:
    torch.manual_seed(0)
    model = Model()
    if kind == "FSDP2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh("cpu", (2,))
        for module in (model.block, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    ids = torch.arange(6)
    given = torch.optim.AdamW(model.parameters()) if optimizer else None
    shapes = ({0: torch.export.Dim.DYNAMIC},) if varies else None
    return capture_train_step(loss_fn, model, ids, optimizer=given, check=False, dynamic_shapes=shapes)


@pytest.fixture
def torchtitans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures trace with torchtitan's tracer."""
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    for module in (trace, update):
        monkeypatch.setattr(module, "trace_with_torch", minimal_fx_tracer)


def facts(module: fx.GraphModule) -> list[tuple[object, ...]]:
    """What passes and messages read of the nodes; frames of a source line differ above the model's own."""
    return [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            bool(node.meta.get("autograd_backward")),
            node.meta.get("seq_nr") is not None,
            node.meta.get("custom"),
        )
        for node in module.graph.nodes
    ]


@pytest.mark.parametrize("kind", ["plain", "FSDP2"])
def test_both_tracers_trace_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    with fake_process_group(2):
        ours = capture(kind, optimizer=kind == "plain")
        request.getfixturevalue("torchtitans")
        theirs = capture(kind, optimizer=kind == "plain")
    assert facts(ours.module) == facts(theirs.module)
    assert (ours.inputs, ours.outputs, ours.written) == (theirs.inputs, theirs.outputs, theirs.written)
    assert any(node.meta.get("autograd_backward") for node in ours.graph.nodes)
    if ours.update is not None and theirs.update is not None:
        assert facts(ours.update.module) == facts(theirs.update.module)


def test_dims_that_vary(request: pytest.FixtureRequest) -> None:
    ours = capture("plain", varies=True)
    request.getfixturevalue("torchtitans")
    theirs = capture("plain", varies=True)
    assert facts(ours.module) == facts(theirs.module)
    assert str(ours.graph.find_nodes(op="placeholder")[-1].meta["val"].shape) != "torch.Size([6])"


def marked(step: CapturedStep) -> list[str]:
    calls = (node for node in step.graph.nodes if node.op == "call_function")
    return [node.name for node in calls if node.meta.get("autograd_backward")]


def test_backward_is_marked_where_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.11, which lacks what marks it."""
    with fake_process_group(2):
        theirs = capture("FSDP2")
        monkeypatch.delattr(torch.compiler, "_patch_engine_backward")
        ours = capture("FSDP2")
    assert [str(node.target) for node in ours.graph.nodes] == [str(node.target) for node in theirs.graph.nodes]
    assert {*marked(theirs)} <= {*marked(ours)}
    first = next(node.name for node in ours.graph.nodes if node.meta.get("autograd_backward"))
    order = [node.name for node in ours.graph.nodes if node.op == "call_function"]
    assert {*marked(ours)} == {*order[order.index(first) :]}


ALONE = """
import sys

for name in ("torchtitan", "torchrec", "fbgemm_gpu", "rich", "tyro", "jinja2", "expecttest", "numpy"):
    sys.modules[name] = None
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group

with fake_process_group(1):
    mesh = dist.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)  # else all of the ReLU may be zero, and the control with it
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    loss_fn, x = lambda model, x: model(x).square().mean(), torch.ones(3, 4)
    step = gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, x), prove=True)
    step(x)
    graph = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    loss_fn(model, x).backward()
    eager = [parameter.grad.to_local() for parameter in model.parameters()]
    print(all(map(torch.equal, graph, eager)), not torch.equal(graph[0], 2 * eager[0]), gp.weight_hash(model) != "")
"""


def test_torch_alone_captures_rewrites_and_proves() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 3, done.stderr
