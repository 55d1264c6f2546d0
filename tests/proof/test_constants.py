"""Constants of a step are what they were when it was captured, and nobody else's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import ProofError
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from graphpasses.proof.prove import prove
from tests.proof.code import X


@dataclass(frozen=True)
class WritesConstant(GraphPass):
    """Writes a constant that the rewritten step shares with the captured one."""

    name = "writes-constant"
    numerics = Numerics.BITWISE

    by: float

    def rewrite(self, graph: Any) -> int:
        (node,) = graph.graph.find_nodes(op="get_attr")
        getattr(graph.module, node.target).mul_(self.by)
        return 1


@pytest.mark.parametrize("size", [2, 2000])
def test_a_constant_that_a_pass_writes(size: int) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() + torch.tensor([2.0] * size).sum()

    step = capture_train_step(loss_fn, nn.Linear(8, 8), X, check=False)
    assert Pipeline((WritesConstant(1.0),)).run(step, prove=True).report is not None
    with pytest.raises(ProofError):
        Pipeline((WritesConstant(2.0),)).run(step, prove=True)


@dataclass(frozen=True)
class TakesForLiteral(GraphPass):
    """Puts a tensor of its own, or the model's, in the place of a literal that has its bits."""

    name = "takes-for-literal"
    numerics = Numerics.BITWISE

    is_own: bool

    def rewrite(self, graph: Any) -> int:
        (node,) = graph.graph.find_nodes(op="get_attr")
        setattr(graph.module, node.target, torch.arange(2.0) if self.is_own else graph.model.buffer[:2])
        return 1


def test_a_literal_in_the_models_memory() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x) + torch.tensor([0.0, 1.0]).sum()

    class Buffered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("buffer", torch.arange(8.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) + self.buffer).sum()

    step = capture_train_step(loss_fn, Buffered(), X, check=False)
    assert Pipeline((TakesForLiteral(is_own=True),)).run(step, prove=True).report is not None
    with pytest.raises(ProofError, match=r"the loss is not proved: .* attribute became attribute"):
        Pipeline((TakesForLiteral(is_own=False),)).run(step, prove=True)


# ---- tensors that others hold -------------------------------------------------------------------------------------

OUTSIDE = torch.zeros(4)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + torch.tensor([0.0, 0.0, 0.0, 0.0])).square().mean() + OUTSIDE.mul(1.0).sum()


def test_a_literal_is_nobody_elses() -> None:
    """Its bits are those of a literal now; who holds it, or a view of it, may write it between two steps."""
    model, x = Holds(), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).backward()
    optimizer.step()
    state = optimizer.state[model.linear.bias]["exp_avg"].zero_()
    step = capture_train_step(lambda model, x: model(x), model, x, optimizer=optimizer, check=False)

    def is_proved(tensor: torch.Tensor) -> bool:
        other = step.copy()
        node, *_ = (
            each
            for each in other.graph.find_nodes(op="get_attr")
            if getattr(other.module, each.target) is not OUTSIDE and each.meta["val"].shape == (4,)
        )
        other.module.register_buffer("another", tensor)
        with other.graph.inserting_before(node):
            constant = other.graph.get_attr("another")
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant)
        return bool(prove(step, other))

    assert is_proved(torch.zeros(4))
    for held in (OUTSIDE.view(4), model.held[0], model.held[0].view(2, 2).view(4), state):
        assert not is_proved(held)
