"""What every record of operators has of one call. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Operator", "Value", "Where"]


@dataclass(frozen=True, slots=True)
class Where:
    """From where an operator is called.

    Args:
        module: FQN of the module whose forward or backward calls it; empty for the model itself.
        line: of the user's code: file, line and function.
        in_backward: whether autograd's engine calls it.
        by_torch: whether torch chose the operator: C++ behind a function, or in backward autograd's formula, and
            neither a module, a hook nor the user's own backward.
    """

    module: str
    line: tuple[str, int, str] | None
    in_backward: bool
    by_torch: bool = False

    def __str__(self) -> str:
        line = " ({}:{} in {})".format(*self.line) if self.line else ""
        of = f"module {self.module!r}" if self.module else "the model itself"
        return f"{'backward' if self.in_backward else 'forward'} of {of}{line}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an operator reads or makes, or that a step begins or ends with.

    Args:
        name: of the argument or the result; or e.g. ``"weight of layers.0.bias"``.
        kind: its dtype and shape.
        digest: 128 bits of its elements and their order, whatever its shape, as 32 hexadecimal digits, or where they
            are yet; None if its memory was never written.
        base: the same of the tensor that it is a transposition of; None for any other.
    """

    name: str
    kind: str
    digest: Any
    base: Any = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator on one rank.

    Args:
        operator: its name.
        where: from where it is called.
        inputs: what it reads: its tensors as :class:`Value`, or all arguments as the oracle compares them.
        outputs: what it makes or writes, likewise.
        arguments: its arguments beside tensors, as text.
        node: name of the node of the graph that calls it; empty in eager.
        is_collective: whether other ranks take part.
        position: in the step.
    """

    operator: str
    where: Where
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    arguments: tuple[str, ...] = ()
    node: str = ""
    is_collective: bool = False
    position: int = 0

    def __str__(self) -> str:
        return f"{self.operator} in the {self.where}{f', node {self.node}' if self.node else ''}"
