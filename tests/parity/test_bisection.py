"""Wrong passes of a task: the operator at which its graph parts from eager, the pass, the rewrite and the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphpasses.commands import app

TASK = """
from dataclasses import dataclass, replace
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from graphpasses import GraphPass, Numerics, default_pipeline

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def model():
    return nn.Sequential(Model(), Model(), nn.Linear(8, 2))

def shard(model, mesh):
    for part in (*model, model):
        fully_shard(part, mesh=mesh)

def loss_fn(model, x):
    return model(x).square().mean()

def batch(step, rank):
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)),)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def calls(graph, target):
    return graph.graph.find_nodes(op="call_function", target=target)

@dataclass(frozen=True)
class Wrong(GraphPass):
    name = "wrong"
    numerics = Numerics.BITWISE

    def rewrite(self, graph):
        {body}
        return 1

def pipeline(plan, layout):
    right = default_pipeline(plan, expected_layout=layout)
    return replace(right, passes=(*right.passes[:{at}], Wrong(), *right.passes[{at}:]))
"""

REDUCE = "torch.ops._c10d_functional.reduce_scatter_tensor.default"
# What the pass does; the operator of eager, its module, and what in its rewrite is seen.
FAULTS = {
    "changed kernel": (
        'node = calls(graph, torch.ops.aten.gelu.default)[1]; node.kwargs = {"approximate": "tanh"}',
        ("result", "aten.gelu.default", "1.act"),
        "approximate=tanh",
    ),
    "wrong scale": (
        "node = calls(graph, torch.ops.aten.div.Scalar)[0]; node.args = (node.args[0], 2.0)",
        ("result", "aten.div.Scalar", ""),
        "other=2.0",
    ),
    "sum for average": (
        f'node = calls(graph, {REDUCE})[1]; node.args = (node.args[0], "sum", *node.args[2:])',
        ("missing", "fsdp.reduce_gradient", "1.up"),
        "reduce_op=sum",
    ),
    "other residual": (
        "node = calls(graph, torch.ops.aten.add.Tensor)[1]; node.args = (node.args[1], node.args[1])",
        ("inputs", "aten.add.Tensor", "1"),
        "reads something else in run B: self",
    ),
    "other weight": (
        "a, b = [n for n in calls(graph, torch.ops.aten.addmm.default)][:2]; b.args = (*b.args[:2], a.args[2])",
        ("inputs", "aten.addmm.default", "0.down"),
        "mat2",
    ),
}


def write_task(path: Path, body: str) -> Path:
    # A wrong reduction is refused where the buckets must have eager's layout.
    path.write_text(TASK.replace("{body}", body).replace("{at}", "4" if REDUCE in body else "2"))
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_finds_operator_pass_and_rewrite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, expected, seen = FAULTS[name]
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "task.py", body)
    command = ["locate", "task.py", "--ranks", "2", "--gpus-per-node", "2", "--steps", "1", "--json"]
    assert app.main(command) == 1
    found = json.loads(capsys.readouterr().out)
    print(found["difference"]["text"], found["culprit"], sep="\n")
    operator = found["difference"]["a"]
    assert (found["difference"]["kind"], operator["operator"], operator["module"]) == expected
    assert found["pass"] == "wrong"
    assert seen in found["culprit"]
    assert found["script"] == "runs/locate/reproduce.py"
