"""Ranks whose steps launch different collectives are told so before they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import AgreementError
from graphpasses.graph import WAIT, TrainGraph, argument, find_collectives
from graphpasses.graph.certificate import find_unlike_launch
from graphpasses.graph.nodes import wait_of
from graphpasses.ops.pack_all_to_all import PACK
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import BucketAllToAll
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.all_to_alls import capture, evenly

aten = torch.ops.aten


@dataclass(frozen=True)
class Exchange(GraphPass):
    """Launches two collectives in the other order, on the last rank or on all."""

    name = "exchange"
    numerics = Numerics.BITWISE

    on_all: bool

    def rewrite(self, graph: TrainGraph) -> int:
        if not self.on_all and dist.get_rank() == 0:
            return 0
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        launches = sorted(find_collectives(graph.graph), key=order.__getitem__)
        one, other = next((a, b) for a, b in pairwise(launches) if order[wait_of(a)] > order[b])
        other.append(one)
        return 1


@dataclass(frozen=True)
class Turn(GraphPass):
    """Exchanges the first two elements of the rows that a collective sends, and of those that it brings."""

    name = "turn"
    numerics = Numerics.BITWISE

    rows: tuple[int, int]  # of what is sent, and of what comes

    def rewrite(self, graph: TrainGraph) -> int:
        launch = find_collectives(graph.graph)[0]
        sent, wait = argument(launch), wait_of(launch)
        users = [*wait.users]
        with graph.graph.inserting_before(launch):
            launch.replace_input_with(sent, self._turned(graph, sent, self.rows[0]))
        with graph.graph.inserting_before(wait.next):
            back = self._turned(graph, wait, self.rows[1])
        for user in users:
            user.replace_input_with(wait, back)
        return 1

    def _turned(self, graph: TrainGraph, node: fx.Node, num_rows: int) -> fx.Node:
        rows = graph.emit(aten.view.default, (node, [num_rows, -1]), like=node)
        places = ((1, 2), (0, 1), (2, rows.meta["val"].shape[1]))
        parts = [graph.emit(aten.slice.Tensor, (rows, 1, *place), like=node) for place in places]
        turned = graph.emit(aten.cat.default, (parts, 1), like=node)
        return graph.emit(aten.view.default, (turned, list(node.meta["val"].shape)), like=node)


@dataclass(frozen=True)
class TurnOnOne(Turn):
    """Does so on the last rank alone, and says that it may round: its own bits are not proved."""

    numerics = Numerics.ROUNDING

    def rewrite(self, graph: TrainGraph) -> int:
        return super().rewrite(graph) if dist.get_rank() else 0


def steps() -> dict[str, str]:
    """Runs on every rank: calls a step whose collectives are exchanged, and returns what was raised."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    captured = gp.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
    found = {}
    for name, on_all, prove in (
        ("one rank", False, None),
        ("all ranks", True, None),
        ("all ranks, proved on one", True, dist.get_rank() == 0),
    ):
        passes = (*gp.default_pipeline().passes, Exchange(on_all=on_all))
        step = Pipeline(passes).run(captured, prove=prove)
        try:
            found[name] = str(step(torch.ones(2, 4)).item())
        except AgreementError as error:
            found[name] = str(error)
    turned = Pipeline((*gp.default_pipeline().passes, TurnOnOne((1, 2)))).run(captured)
    with pytest.raises(AgreementError) as caught:
        turned(torch.ones(2, 4))
    found["turned"] = str(caught.value)
    # What only one rank does is said before the capture runs an eager step, in which others would wait for ever.
    model[1].weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(AgreementError) as caught:
        gp.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
    found["frozen"] = str(caught.value)
    every = 2 if dist.get_rank() else None
    with pytest.raises(AgreementError) as caught:
        gp.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4), check_every=every)
    found["given"] = str(caught.value)
    return found


@pytest.mark.multiprocess
def test_exchange_on_one_rank() -> None:
    zero, one = run_ranks(steps, 2)
    told = (
        "ranks 0 and 1 would wait for each other, or mix what they send: as collective 0 of the step, rank 0 "
        "launches _c10d_functional.all_gather_into_tensor.default(2) of 10 torch.float32 of parameter 0.weight; "
        "parameter 0.bias, rank 1 _c10d_functional.all_gather_into_tensor.default(2) of 10 torch.float32 of "
        "parameter 1.weight; parameter 1.bias. Let loss_fn run the same modules and collectives in one order on all "
        "ranks (some alone may communicate after the step), and run the same passes; a pass must not decide by what "
        "only its rank knows"
    )
    assert zero["one rank"] == one["one rank"] == told
    assert "as collective 0 of what pass 'turn' made" in zero["turned"]
    assert "with elements in other places" in zero["turned"] == one["turned"]
    assert "default(avg, 2) of 20 torch.float32 of gradient 1.weight; gradient 1.bias, rank 1" in zero["frozen"]
    assert "default(avg, 2) of 4 torch.float32 of gradient 1.bias. Let" in zero["frozen"] == one["frozen"]
    assert "capture one step with different check_every: None and 2." in zero["given"] == one["given"]
    # Controls: the same on all ranks is one step, and where a rank has no proof nothing is compared.
    assert float(zero["all ranks"]) == float(zero["all ranks, proved on one"]) > 0


def test_all_to_alls_that_travel_in_another_order() -> None:
    """A rank that packs and unpacks in another order proves its own graph, but does not meet the others."""
    with fake_process_group(2):
        before = capture(lambda x, y: [evenly(x * 2), evenly(y * 3)], torch.ones(2, 4), torch.ones(2, 4))
        after = Pipeline((BucketAllToAll(),)).run(before)
        one = gp.prove(before, after)
        (pack,) = after.graph.find_nodes(op="call_function", target=PACK)
        (unpack,) = (node for node in after.graph.nodes if "unpack" in str(node.target))
        pack.args = (pack.args[0][::-1], *pack.args[1:])  # type: ignore[index]
        for part in [*unpack.users]:
            part.args = (unpack, 1 - part.args[1])  # type: ignore[operator]
        two = gp.prove(before, after)
    assert one
    assert two
    assert [*one.launches[0].contents] == [*two.launches[0].contents][::-1] == ["launch 0", "launch 1"]


def reduced(x: Tensor) -> Tensor:
    return WAIT(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, dist.group.WORLD.group_name))


def gathered(x: Tensor) -> Tensor:
    return WAIT(torch.ops._c10d_functional.all_gather_into_tensor(x, 2, dist.group.WORLD.group_name))


@pytest.mark.parametrize(
    ("exchange", "rows"),
    [(gathered, (2, 4)), (evenly, (2, 2)), (reduced, (2, 1))],
    ids=["all-gather", "all-to-all", "reduce-scatter"],
)
@pytest.mark.parametrize("is_computed", [False, True])
def test_elements_that_travel_in_another_order(
    exchange: Callable[[Tensor], Tensor], rows: tuple[int, int], is_computed: bool
) -> None:
    """Likewise where the elements of one tensor stand in another order."""

    def step(x: Tensor) -> list[Tensor]:
        return [exchange(x.tanh() if is_computed else x * 1)]

    with fake_process_group(2):
        before = capture(step, torch.ones(2, 4), is_fixed=True)
        one, two = (Pipeline(passes).run(before) for passes in ((), (Turn(rows),)))
        launches = [gp.prove(before, after).launches for after in (before, one, two)]
    assert find_unlike_launch(*launches[:2]) is None
    assert find_unlike_launch(*launches[1:]) == 0
