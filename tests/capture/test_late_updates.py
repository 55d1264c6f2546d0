"""What of a backward graph can wait for the gradients of dense layers, and how it runs by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture.late_updates import LateUpdates, find_late
from tests.helpers.all_to_alls import evenly


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def names(graph: fx.Graph, late: set[fx.Node]) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.nodes if node in late]


def backward(table: Tensor, gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    arrived = evenly(gradient * 2)
    table.add_(arrived, alpha=-0.5)
    return (x.mm(gradient),)


INPUTS = torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2)


def test_what_no_output_needs_waits() -> None:
    graph = make_fx(backward)(*INPUTS).graph
    assert names(graph, find_late(graph)) == ["wait_tensor", "add_"]


def read_after(table: Tensor, gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    table.add_(evenly(gradient), alpha=-0.5)
    return (x.mm(table),)


def sent_after(table: Tensor, gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    table.add_(evenly(evenly(gradient) * 2), alpha=-0.5)
    return (x.mm(gradient),)


@pytest.mark.parametrize(("near_miss", "late"), [(read_after, []), (sent_after, ["wait_tensor", "add_"])])
def test_what_an_output_or_a_launch_needs_does_not(near_miss: Any, late: list[str]) -> None:
    """All ranks launch their collectives in one order, whatever each of them updates."""
    graph = make_fx(near_miss)(*INPUTS).graph
    assert names(graph, find_late(graph)) == late


@pytest.mark.parametrize("is_reached", [True, False])
def test_it_runs_after_gradients_are_accumulated_and_before_earlier_nodes(is_reached: bool) -> None:
    """Where a backward does not reach what was made for it, at the end."""
    updates, log = LateUpdates(torch.device("cpu")), []
    layer = nn.Linear(2, 2, bias=False)
    compiled = updates.compile(
        make_fx(backward)(*INPUTS), INPUTS, lambda part, _, places: lambda values: part(*values)
    )
    table = torch.zeros(2, 2)

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor) -> Tensor:
            return x.mm(weight)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            (result,) = compiled([table, gradients[0], torch.eye(2)])
            return result, result, None

    def note(name: str) -> Any:
        return lambda _: log.append((name, table.sum().item()))

    layer.weight.register_post_accumulate_grad_hook(note("accumulated"))
    x = torch.ones(2, 2, requires_grad=True)
    before = x * 3
    before.register_hook(note("earlier node"))
    loss = Graph.apply(before, layer.weight, updates.token()).sum()  # type: ignore[no-untyped-call]
    loss.backward(inputs=None if is_reached else [layer.weight])
    after = -4.0  # all of a gradient of ones, which each rank sends twice, halved
    assert log == [("accumulated", 0.0), ("earlier node", after)][: 2 if is_reached else 1]
    assert table.sum().item() == after
