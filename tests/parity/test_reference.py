"""A captured step beside its eager reference: the operator at which they part, and none where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses import capture_train_step, default_pipeline, weight_hash
from graphpasses._torch.fsdp2_accumulation import pending_gradients
from graphpasses._torch.recorded_operator import Operator
from graphpasses.graph import CapturedStep
from graphpasses.parity import locate_step
from graphpasses.parity.first_difference import first_difference
from graphpasses.parity.operators import OperatorStep
from graphpasses.parity.record_operators import operators_recorded, values_of
from graphpasses.simulate import Topology, run_cluster
from tests.helpers import faults, models


def change(step: CapturedStep, operator: Any, index: int, **kwargs: Any) -> str:
    node = step.graph.find_nodes(op="call_function", target=operator)[index]
    node.kwargs = kwargs
    step.module.recompile()
    return node.name


def test_finds_the_node_and_leaves_the_model() -> None:
    torch.manual_seed(0)
    model, tokens = faults.Model(), torch.randint(10, (3, 5))
    loss_fn = faults.Trainer(model).loss
    step = capture_train_step(loss_fn, model, tokens)
    loss_fn(model, tokens).backward()
    model.emb.weight.grad.fill_(3)
    weights, state = weight_hash(model), torch.get_rng_state()
    assert locate_step(step, loss_fn, tokens).difference is None
    name = change(step, torch.ops.aten.gelu.default, 1, approximate="tanh")
    found = locate_step(step, loss_fn, tokens).difference
    assert found is not None
    assert found.b is not None
    assert (found.kind, found.b.node, found.b.where.module) == ("result", name, "layers.1.act")
    assert weight_hash(model) == weights
    assert torch.equal(torch.get_rng_state(), state)
    assert model.emb.weight.grad.unique().tolist() == [3]


@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_step_that_updates(num_calls: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch.pop("x")).square().sum()

    step, wrong = (capture_train_step(loss_fn, model, {"x": x}, optimizer=optimizer, clip_norm=0.1) for _ in range(2))
    name = change(wrong, torch.ops.aten.gelu.default, 0, approximate="tanh")
    for _ in range(num_calls):
        step({"x": x})
    weights, states, norm = weight_hash(model), len(optimizer.state), step.grad_norm
    assert locate_step(step, loss_fn, {"x": x}).difference is None
    found = locate_step(wrong, loss_fn, {"x": x}).difference
    assert found is not None
    assert found.b is not None
    assert found.b.node == name
    assert (weight_hash(model), len(optimizer.state)) == (weights, states)
    assert step.grad_norm is norm


def test_a_step_that_is_captured_while_operators_are_recorded() -> None:
    """At first, and again for a batch that decides otherwise."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4)

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum() if mask.all() else model(x).sum()

    calls: list[Operator] = []
    with operators_recorded(model, calls.append):
        step = capture_train_step(loss_fn, model, x, torch.tensor(True))
        step(x, torch.tensor(True))
    assert [each.operator for each in calls].count("aten.gelu.default") == 1  # the capture's own are none of it
    assert locate_step(step, loss_fn, x, torch.tensor(False)).difference is None
    assert len(step.captures) == 2


def test_what_a_capture_communicates_is_not_recorded() -> None:
    def play() -> list[str]:
        model, batch = sharded(models.LanguageModel, LOW), models.token_batch(dist.get_rank())
        calls: list[Operator] = []
        with operators_recorded(model, calls.append):
            capture_train_step(models.next_token_loss, model, *batch)
        return [each.operator for each in calls if each.operator.startswith("fsdp.")]

    assert run_cluster(play, Topology(2, gpus_per_node=2)) == [[], []]


def test_gradients_that_wait_are_left() -> None:
    def play() -> bool:
        model, batch = sharded(models.LanguageModel, LOW), models.token_batch(dist.get_rank())
        step = default_pipeline().run(capture_train_step(models.next_token_loss, model, *batch, check=False))
        step.accumulate(*batch)
        before = {name: each.clone() for name, each in pending_gradients(model).items()}
        assert locate_step(step, models.next_token_loss, *batch).difference is None
        after = pending_gradients(model)
        return bool(before) and all(torch.equal(before[name], after[name]) for name in before)

    assert run_cluster(play, Topology(2, gpus_per_node=2)) == [True, True]


def sharded(make: Callable[[], Any], policy: MixedPrecisionPolicy, shard: Any = fully_shard) -> Any:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = make()
    for layer in getattr(model, "layers", ()):
        shard(layer, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    return model


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "policy", "shard"),
    [
        (models.LanguageModel, LOW, fully_shard),  # ties, shards of other sizes
        (models.LanguageModel, LOW, replicate),
        (models.Recomputed, MixedPrecisionPolicy(), fully_shard),
        (models.Unused, LOW, fully_shard),
    ],
)
def test_no_operator_of_eager_is_missed_in_a_rewritten_graph(make: Any, policy: Any, shard: Any) -> None:
    """The streams themselves have no difference, whatever passes move, merge, gather again and pack."""

    def play() -> list[Any]:
        model, batch = sharded(make, policy, shard), models.token_batch(dist.get_rank())
        captured = capture_train_step(models.next_token_loss, model, *batch, check=False)
        step = default_pipeline().run(captured)
        sides = []
        for run in (lambda: models.next_token_loss(model, *batch).backward(), lambda: step(*batch)):
            operators: list[Operator] = []
            with operators_recorded(model, operators.append):
                run()
            sides.append(OperatorStep(dist.get_rank(), 0, (), operators, values_of(model, gradients=True)))
            model.zero_grad()
        a, b = sides
        right = first_difference(a, b)
        name = change(step, torch.ops.aten.relu.default, 1)
        (node,) = (each for each in step.graph.nodes if each.name == name)
        node.target = torch.ops.aten.sigmoid.default
        step.module.recompile()
        wrong = locate_step(step, models.next_token_loss, *batch).difference
        return [right, wrong and wrong.a and (wrong.a.operator, wrong.a.where.module)]

    for right, wrong in run_cluster(play, Topology(2, gpus_per_node=2)):
        assert right is None
        assert wrong == ("aten.relu.default", "layers.1")


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_seeds_of_attention_count_where_it_drops_something(dropout_p: float) -> None:
    with torch.library._scoped_library("attention_of_test", "FRAGMENT") as library:
        library.define("attend(Tensor x, float dropout_p=0.) -> (Tensor, Tensor philox_seed, Tensor? unused)")
        seeds = iter((1, 2))  # what memory holds that no kernel wrote
        library.impl("attend", lambda x, dropout_p=0.0: (x * 2, torch.tensor(next(seeds)), None), "CPU")
        x, steps = torch.ones(2), []
        for _ in range(2):
            calls: list[Operator] = []
            with operators_recorded(nn.Module(), calls.append):
                torch.ops.attention_of_test.attend(x, dropout_p)
            steps.append(OperatorStep(0, 0, (), calls, ()))
    seeds_of = [[each.outputs[1].digest for each in step.operators if "attend" in each.operator] for step in steps]
    assert (seeds_of == [[None], [None]]) == (dropout_p == 0)
    assert (first_difference(*steps) is None) == (dropout_p == 0)


def test_one_rank_differs() -> None:
    """Rank 1's graph alone is wrong: every rank is told of rank 1's operator."""

    def play() -> tuple[int, str, str]:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        model, batch = sharded(make, MixedPrecisionPolicy()), torch.ones(2, 8)
        step = default_pipeline().run(capture_train_step(loss_fn, model, batch, check=False))
        if dist.get_rank() == 1:
            change(step, torch.ops.aten.gelu.default, 0, approximate="tanh")
        found = locate_step(step, loss_fn, batch).difference
        assert found is not None
        assert found.operator is not None
        return found.rank, found.operator.operator, found.operator.where.module

    assert run_cluster(play, Topology(2, gpus_per_node=2)) == [(1, "aten.gelu.default", "1")] * 2
