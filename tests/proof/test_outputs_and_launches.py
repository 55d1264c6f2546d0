"""What is proved of outputs beside their values, of launches before someone waits, of labels and of zeros' signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.effects import is_check
from graphpasses.errors import ProofError
from graphpasses.graph import Stage, TrainGraph, find_collectives
from graphpasses.graph.nodes import collective_group
from graphpasses.passes.runner import GraphPass, Numerics
from graphpasses.proof.prove import prove
from tests.helpers.all_to_alls import Step, capture
from tests.helpers.kept import Keep
from tests.proof.code import Code, Make, answer, capture_model

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def why_not(before: Step, after: Step, *inputs: Tensor, stage: Stage = Stage.STEP) -> str:
    """Returns why two functions are not proved to be the same; empty if they are."""
    one, two = (capture(each, *inputs, stage=stage, is_fixed=True) for each in (before, after))
    try:
        return "; ".join(reason for _, reason in prove(one, two).unproved)
    except ProofError as error:
        return str(error).partition("\n")[0]


# ---- how outputs lie ----------------------------------------------------------------------------------------------


def doubled(x: Tensor) -> list[Tensor]:
    return [x * 2, x * 2]


def once(x: Tensor) -> list[Tensor]:
    return [x * 2] * 2


def viewed(x: Tensor) -> list[Tensor]:
    y = x * 2
    return [y, y.view(4, 4)]


@pytest.mark.parametrize("stage", [Stage.STEP, Stage.JOINT, Stage.FORWARD])
def test_in_whose_memory_outputs_lie(stage: Stage) -> None:
    x = torch.ones(4, 4)
    assert why_not(doubled, doubled, x, stage=stage) == ""
    assert "in the memory of output 1, as it did not" in why_not(doubled, viewed, x, stage=stage)
    assert ("the memory of" in why_not(doubled, once, x, stage=stage)) == (stage is not Stage.STEP)  # which copies
    assert "the memory of x_1" in why_not(lambda x: [x.clone()], lambda x: [x.view(4, 4)], x, stage=stage)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda x: [(x * 2).t().contiguous().t()], "strides [1, 4]"),
        (lambda x: [(x[:1] * 2).expand(4, 4)], "strides [0, 1]"),
        (lambda x: [torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(4, 4) * 2], ""),
        (lambda x: [(torch.cat([x.view(-1)[:1], x.view(-1)]) * 2)[1:].view(4, 4)], "memory that begins at 4"),
    ],
)
def test_how_outputs_lie(after: Step, reason: str) -> None:
    def before(x: Tensor) -> list[Tensor]:
        return [(x[:1] * 2).expand(4, 4).clone(memory_format=torch.contiguous_format)] if "0" in reason else [x * 2]

    found = why_not(before, after, torch.ones(4, 4))
    assert found == (reason and f"it lies in {reason}, as it did not")


# ---- launches -----------------------------------------------------------------------------------------------------


def reduced(launch: Callable[[Tensor], object], then: Callable[[Tensor, Tensor], object], *, is_late: bool) -> Step:
    """Reduces a tensor, and calls ``then`` before, or after, someone has waited."""

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        sent = x * 1
        came = launch(sent)
        came = came[0] if isinstance(came, list) else came
        assert isinstance(came, Tensor)
        if not is_late:
            then(sent, came)
        done = c10d.wait_tensor(came)
        if is_late:
            then(sent, done)
        return [done.tanh()]

    return step


def alone(x: Tensor) -> object:
    return c10d.all_reduce(x, "sum", "0")


def coalesced(x: Tensor) -> object:
    return c10d.all_reduce_coalesced([x], "sum", "0")


def with_gradients(x: Tensor) -> object:
    return torch.ops._c10d_functional_autograd.all_to_all_single(x, [2, 2], [2, 2], "0")


@pytest.mark.parametrize("launch", [alone, coalesced, with_gradients])
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda sent, _: sent.add_(1), "add_ writes what {}"),
        (lambda _, came: came.copy_(torch.ones(4)), "copy_ writes what {}"),
        (lambda _, came: came.view(2, 2).tanh(), ", which tanh reads"),
    ],
)
def test_before_anyone_has_waited(
    launch: Callable[[Tensor], object], then: Callable[[Tensor, Tensor], object], reason: str
) -> None:
    with fake_process_group(2):
        late, early = (reduced(launch, then, is_late=is_late) for is_late in (True, False))
        x = torch.ones(4)
        assert why_not(late, late, x, x) == ""
        found = why_not(late, early, x, x)
    assert "depend on chance" in found
    assert reason.format("all_to_all" if launch is with_gradients else "all_reduce") in found


def test_a_write_beside_what_is_sent() -> None:
    """Two inputs are parts of one tensor: it counts whether they overlap."""

    def step(is_late: bool) -> Step:
        def function(x: Tensor, y: Tensor) -> list[Tensor]:
            came = alone(x)
            assert isinstance(came, Tensor)
            if not is_late:
                y.mul_(2)
            done = c10d.wait_tensor(came)
            if is_late:
                y.mul_(2)
            return [done]

        return function

    whole = torch.ones(8)
    with fake_process_group(2):
        assert "mul_ writes what all_reduce sends" in why_not(step(True), step(False), whole[:5], whole[4:])
        assert why_not(step(True), step(False), whole[:4], whole[4:]) == ""


def test_every_call_on_a_group_is_a_launch() -> None:
    def step(is_first: bool) -> Step:
        def run(x: Tensor) -> list[Tensor]:
            group = torch.distributed.group.WORLD.group_name
            moved = torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group) if is_first else None
            total = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
            return [torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group) if moved is None else moved, total]

        return run

    with fake_process_group(2):
        one, two = (capture(step(is_first), torch.ones(4, 4), is_fixed=True) for is_first in (True, False))
        launches = [each.call.partition("(")[0] for each in prove(one, two).launches]
    assert launches == ["_c10d_functional.all_reduce.default", "_dtensor.shard_dim_alltoall.default"]


LAUNCHES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all-reduce": lambda x, group: c10d.wait_tensor(c10d.all_reduce(x, "sum", group)),
    "at once": lambda x, group: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group),
    "all-gather": lambda x, group: c10d.wait_tensor(c10d.all_gather_into_tensor(x.exp(), 2, group)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_the_same_may_bring_something_else(name: str) -> None:
    def step(*, is_exchanged: bool) -> Step:
        def run(x: Tensor) -> list[Tensor]:
            one, two = (LAUNCHES[name](x, torch.distributed.group.WORLD.group_name) for _ in "ab")
            return [two * 2, one * 3] if is_exchanged else [one * 2, two * 3]

        return run

    with fake_process_group(2):
        as_is, exchanged = (step(is_exchanged=each) for each in (False, True))
        assert why_not(as_is, as_is, torch.ones(4, 4)) == ""
        assert "(and 1 others: output " in why_not(as_is, exchanged, torch.ones(4, 4))


def test_a_gather_of_fewer_ranks_than_the_group_has() -> None:
    def step(num_ranks: int) -> Step:
        def run(x: Tensor) -> list[Tensor]:
            group = torch.distributed.group.WORLD.group_name
            return [c10d.wait_tensor(c10d.all_gather_into_tensor(x, num_ranks, group))[:4]]

        return run

    with fake_process_group(4):
        assert why_not(step(4), step(4), torch.ones(2)) == ""
        assert why_not(step(4), step(3), torch.ones(2))
    with fake_process_group(3):
        assert why_not(step(3), step(3), torch.ones(2)) == ""


@dataclass(frozen=True)
class OtherGroups(GraphPass):
    """Exchanges the groups of shards and of replicas, which have as many ranks."""

    name = "other-groups"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        launches = find_collectives(graph.graph)
        one, two = dict.fromkeys(map(collective_group, launches))
        others = {one: two, two: one}
        for launch in launches:
            launch.args = tuple(
                others[each] if type(each) is str and each in others else each for each in launch.args
            )
        return len(launches)


def test_a_group_of_as_many_ranks() -> None:
    with fake_process_group(4):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        step = gp.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        assert gp.Pipeline(()).run(step, prove=True)
        with pytest.raises(ProofError, match="changes the loss"):
            gp.Pipeline((OtherGroups(),)).run(step)


def checked(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    if torch.isnan(loss):
        raise ValueError("the loss is no number")
    return loss


@dataclass(frozen=True)
class LosesCheck(GraphPass):
    """Rounds, and leaves out a check."""

    name = "loses-check"
    numerics = Numerics.ROUNDING

    def rewrite(self, graph: TrainGraph) -> int:
        checks = [node for node in graph.graph.nodes if is_check(node)]
        for node in checks:
            graph.graph.erase_node(node)
        return len(checks)


def test_a_pass_that_may_round_keeps_checks() -> None:
    step = gp.capture_train_step(checked, nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(ProofError, match=r"pass 'loses-check' changes the check .*: it is lost"):
        gp.Pipeline((LosesCheck(),)).run(step)


# ---- labels -------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Reads running statistics after they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        assert self.norm.running_mean is not None
        return y, self.norm.running_mean * 2


@pytest.fixture(scope="module")
def graphs() -> dict[Stage, TrainGraph]:
    keep = Keep((Stage.DYNAMO, Stage.JOINT))
    model = gp.compile(Statistics(), pipeline=gp.Pipeline((keep,)), inner="aot_eager")
    model(torch.ones(3, 4))[0].sum().backward()
    return {graph.stage: graph for graph in keep.graphs}


def test_labels_of_what_goes_by_its_place(graphs: dict[Stage, TrainGraph]) -> None:
    before = graphs[Stage.JOINT]
    assert prove(before, before.copy())
    after = before.copy()
    slots = after.gradient_slots()
    (one,), (two,) = slots["norm.weight"], slots["norm.bias"]
    values, outputs = after.output_values, [*after.outputs]
    after.set_output(one, values[two])
    after.set_output(two, values[one])
    outputs[one], outputs[two] = outputs[two], outputs[one]
    with pytest.raises(ProofError, match=r"keep anything: gradient 'norm.bias' has another place"):
        prove(before, replace(after, outputs=tuple(outputs)))


def test_a_function_that_writes_statistics(graphs: dict[Stage, TrainGraph]) -> None:
    before = graphs[Stage.DYNAMO]
    after = before.copy()
    (norm,) = after.graph.find_nodes(op="call_function", target=F.batch_norm)
    *_, product = after.graph.nodes
    product = product.prev
    norm.prepend(product)
    with pytest.raises(ProofError, match=r"output 1: what torch.nn.functional.batch_norm writes became buffer"):
        prove(before, after)


# ---- signs of zeros -----------------------------------------------------------------------------------------------


def test_signs_of_complex_zeros_and_of_defaults() -> None:
    captured = capture_model()

    def full(number: complex) -> Make:
        def make(code: Code) -> fx.Node:
            complex_ = code.full_default([8, 8], number, dtype=torch.complex64)
            return code.sum_default(code.angle_default(complex_))

        return make

    def drawn(mean: float) -> Make:
        return lambda code: code.tanh_default(code.normal__default(code.clone_default(code.x), mean))

    pairs = (full(complex(-1, 0.0)), full(complex(-1, -0.0))), (drawn(0.0), drawn(-0.0))
    for one, two in pairs:
        assert answer(captured, one, one) == "proved"
        assert answer(captured, one, two) != "proved"


def test_a_number_that_a_dtype_has_not() -> None:
    def filled(number: int) -> Make:
        return lambda code: code.fill_Scalar(code._to_copy_default(code.x, dtype=torch.int8), number)

    def widened(number: int) -> Make:
        return lambda code: code._to_copy_default(filled(number)(code), dtype=torch.float32)

    assert answer(capture_model(), widened(1), widened(257)) == "refused"  # the call would fail
