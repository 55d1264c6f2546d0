"""Losses written call by call at the end of a captured step, and what a proof says of two."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE
from graphpasses.proof.prove import prove

aten = torch.ops.aten
X = torch.linspace(-1, 1, 64).view(8, 8)


class Model(nn.Module):
    """What the cases compute with: a weight, a buffer, and a constant that make_fx keeps as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("buffer", torch.arange(64.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + torch.tensor([1.0, 2.0]).sum() + self.buffer.clone()[0]


def capture_model() -> CapturedStep:
    return capture_train_step(lambda model, x: model(x), Model(), X, check=False)


class Code:
    """Writes calls at the end of a step."""

    def __init__(self, step: CapturedStep) -> None:
        self.step = step.copy()
        self._last = self.step.output_values[0]
        nodes = dict(zip((item.fqn for item in step.inputs), self.step.placeholders, strict=True))
        self.x, self.buffer = nodes["batch[0]"], nodes["buffer"]
        self.weight, self.bias = nodes["linear.weight"], nodes["linear.bias"]

    def __getattr__(self, name: str) -> Callable[..., fx.Node]:
        """Returns what calls an operator: ``code.add_Tensor(x, y)``."""
        packet, _, overload = name.rpartition("_")
        target = getattr(getattr(aten, packet), overload)
        return lambda *args, **kwargs: self.call(target, *args, **kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.step.graph.inserting_before(self.step.graph.output_node()):
            return self.step.emit(target, args, kwargs, like=self._last)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def constant(self) -> fx.Node:
        node = next(iter(self.step.graph.find_nodes(op="get_attr")))
        with self.step.graph.inserting_before(self.step.graph.output_node()):
            new = self.step.graph.get_attr(node.target)
        new.meta["val"] = node.meta["val"]
        return new

    def finished(self, loss: fx.Node) -> CapturedStep:
        self.step.set_output(0, loss)
        return self.step


Make = Callable[[Code], fx.Node]


def answer(captured: CapturedStep, before: Make, after: Make) -> str:
    steps = []
    for make in (before, after):
        code = Code(captured)
        steps.append(code.finished(make(code)))
    try:
        certificate = prove(*steps)
    except ProofError as error:
        return "differs" if " changes " in str(error).splitlines()[0] else "refused"
    return "proved" if certificate else "not proved"


@dataclass(frozen=True)
class Case:
    """The loss of a captured step, made in three ways.

    ``before`` and ``wrong`` part on real tensors, or on some device, so ``wrong`` is never proved; ``right`` has the
    bits of ``before``.
    """

    name: str
    before: Make
    wrong: Make
    right: Make


def check(captured: CapturedStep, case: Case) -> None:
    assert answer(captured, case.before, case.before) == "proved"
    assert answer(captured, case.before, case.right) == "proved"
    assert answer(captured, case.before, case.wrong) != "proved"


def drawn_again(is_twice: bool, *devices: torch.device) -> Make:
    """Draws, perhaps for the second time from the states that were read before."""

    def make(code: Code) -> fx.Node:
        states = [code.call(READ_RANDOM_STATE, *given) for given in ((), *zip(devices))]
        if is_twice:
            code.uniform__default(code.clone_default(code.x))
        for state, given in zip(states, ((), *zip(devices)), strict=True):
            code.call(SET_RANDOM_STATE, state, *given)
        return code.tanh_default(code.uniform__default(code.clone_default(code.x)))

    return make


OTHER = torch.device("cpu")  # of whose generator nothing is known: it stands for an accelerator's
