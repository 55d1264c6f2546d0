"""What a pass asks of a size that may vary is right for the captured batch alone: no proof takes it for true."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.graph import CapturedStep
from graphpasses.proof.prove import prove

aten = torch.ops.aten
NUM_ROWS = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) * self.weight).sum() + torch.ones(4).mul(2.0).sum()


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    rows = ({0: torch.export.Dim("rows")},)
    batch = torch.linspace(-1, 1, 4 * NUM_ROWS).view(-1, 4)
    return capture_train_step(lambda model, x: model(x), Model(), batch, check=False, dynamic_shapes=rows)


Emit = Callable[..., fx.Node]


def rewritten(captured: CapturedStep, change: Callable[[Emit, fx.Node], fx.Node]) -> CapturedStep:
    """Puts what is made of the batch in its place."""
    step = captured.copy()
    (x,) = (node for item, node in zip(step.inputs, step.placeholders, strict=True) if item.fqn == "batch[0]")
    readers = list(x.users)
    with step.graph.inserting_before(next(node for node in step.graph.nodes if node in x.users)):
        made = change(lambda target, *args: step.emit(target, args, like=x), x)
    for reader in readers:
        reader.replace_input_with(x, made)
    return step


@pytest.mark.parametrize(
    "change",
    [
        lambda emit, x: emit(aten.slice.Tensor, x, 0, 0, 2 * NUM_ROWS),
        lambda emit, x: emit(operator.getitem, emit(aten.split.Tensor, x, 2 * NUM_ROWS), 0),
        lambda emit, x: emit(aten.view.default, x, [NUM_ROWS, 4]),
        lambda emit, x: emit(aten.expand.default, x, [NUM_ROWS, 4]),
    ],
    ids=["sliced", "split", "viewed", "expanded"],
)
def test_what_is_right_for_some_numbers_of_rows(
    captured: CapturedStep, change: Callable[[Emit, fx.Node], fx.Node]
) -> None:
    step, more = rewritten(captured, change), torch.ones(3 * NUM_ROWS, 4)
    assert not prove(captured, step)
    with suppress(RuntimeError):  # of which the call says why
        assert step(more) != captured(more)


def test_what_is_right_for_all(captured: CapturedStep) -> None:
    assert prove(captured, rewritten(captured, lambda emit, x: emit(aten.slice.Tensor, x, 0, 0, 2**63 - 1)))
    assert prove(captured, rewritten(captured, lambda emit, x: emit(aten.view.default, x, [-1, 4])))


def test_a_size_that_a_batch_may_not_have(captured: CapturedStep) -> None:
    step = captured.copy()
    (x,) = (node for item, node in zip(step.inputs, step.placeholders, strict=True) if item.fqn == "batch[0]")
    (ones,) = (node for node in step.graph.nodes if node.target is aten.ones.default)
    with step.graph.inserting_before(ones):
        size = step.emit(aten.sym_size.int, (step.emit(aten.slice.Tensor, (x, 0, 0, 4), like=x), 0), like=x)
    assert size.meta["val"] == 4
    ones.args = ([size], *ones.args[1:])
    assert not prove(captured, step)
    assert step(torch.ones(3, 4)) != captured(torch.ones(3, 4))
