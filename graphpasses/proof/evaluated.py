"""What a graph does, in numbers of values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphpasses.proof.values import Value

__all__ = ["Argument", "Collective", "Evaluated", "Result"]

Result = Any  # a Value, a list of such, or None


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor, or another value of a node, that an operator reads.

    Args:
        number: of the value.
        strides: of the tensor; None where they do not matter, or depend on data.
    """

    number: int
    strides: tuple[int, ...] | None


@dataclass(frozen=True)
class Collective:
    """One launch.

    Args:
        node: the launch.
        sent: what this rank gives.
        key: operator, group and other arguments.
    """

    node: fx.Node
    sent: tuple[Value, ...]
    key: Hashable


@dataclass
class Evaluated:
    """What a graph does, in numbers of values.

    Args:
        values: of each node.
        outputs: by what people call them: the loss, the gradient of a parameter, what is written into a buffer; of
            a tied parameter each output that has one.
        written: by what people call them: the tensors from outside that the graph writes.
        collectives: the launches, in order.
        broken: what makes the result depend on chance, such as a write to what a collective still reads.
        axioms: the names of those that were used.
        nodes: those of outputs.
        makers: by the number of a value the first node that has it.
        made: by the number of a source the first node that made it.
        random_state: the number of the state in which the graph leaves the generator of random numbers.
    """

    values: dict[fx.Node, Result] = field(default_factory=dict)
    outputs: dict[str, Value | None] = field(default_factory=dict)
    written: dict[str, Value] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    broken: list[tuple[fx.Node, str]] = field(default_factory=list)
    axioms: set[str] = field(default_factory=set)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    makers: dict[int, fx.Node] = field(default_factory=dict)
    made: dict[int, fx.Node] = field(default_factory=dict)
    random_state: int = 0
