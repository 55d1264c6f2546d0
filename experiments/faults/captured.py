"""Wrong graphs of a captured step: what ``locate_step`` names of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from experiments.faults.fault import Answer, Training
from graphpasses import capture_train_step
from graphpasses.graph import CapturedStep
from graphpasses.parity import Location, locate_step

__all__ = ["CAPTURED", "Edit", "locations"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Edit:
    """A wrong edit of the graph of a step.

    Args:
        name: of the row.
        target: operator of the node.
        index: which of the nodes that call it.
        change: of its arguments: positional, then by name.
        answer: what must be named.
    """

    name: str
    target: Any
    index: int
    change: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    answer: Answer


CAPTURED = (
    Edit("graph: another GELU", aten.gelu.default, 1, lambda args, kwargs: (args, {"approximate": "tanh"}),
         Answer("forward", "aten.gelu.default", "layers.1.act")),
    Edit("graph: a tied weight's use twice", aten.add.Tensor, -1, lambda args, kwargs: ((args[0], args[0]), kwargs),
         Answer("backward", "aten.add.Tensor", "emb")),
    Edit("graph: labels not shifted", aten.roll.default, 0, lambda args, kwargs: ((args[0], [0], [1]), kwargs),
         Answer("loss", "aten.roll.default")),
    Edit("graph: another derivative", aten.gelu_backward.default, 0,
         lambda args, kwargs: (args, {"approximate": "tanh"}),
         Answer("backward", "aten.gelu_backward.default", "layers.1.act")),
)  # fmt: skip


class _Program(Training):
    """What is captured."""

    def train_step(self, tokens: Tensor) -> CapturedStep:
        return capture_train_step(self.loss_of, self.model, tokens)

    def loss_of(self, model: Any, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


def locations() -> Iterator[tuple[Edit | None, Location]]:
    """Yields what ``locate_step`` finds in the step as it was captured (None), and with each edit alone."""
    program = _Program()
    tokens = program.batch(0)
    step = program.train_step(tokens)
    yield None, locate_step(step, program.loss_of, tokens)
    for edit in CAPTURED:
        node: fx.Node = step.graph.find_nodes(op="call_function", target=edit.target)[edit.index]
        before = node.args, node.kwargs
        node.args, node.kwargs = edit.change(node.args, dict(node.kwargs))
        step.module.recompile()
        yield edit, locate_step(step, program.loss_of, tokens)
        node.args, node.kwargs = before
        step.module.recompile()
