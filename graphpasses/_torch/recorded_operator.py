"""One call of an operator, as every record of operators has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MODULE_FQN = "module_fqn"
"""The key of ``meta["custom"]`` that names a node's module; torchtitan's graph_trainer has the same."""

Phase = Literal["", "forward", "loss", "backward", "reduction", "gradients", "optimizer"]
"""A part of a step. Of what treats gradients before the optimizer, "reduction" communicates, "gradients" does not."""

_PLACES = {
    "loss": "loss",
    "gradients": "treatment of gradients",
    "optimizer": "optimizer",
    "reduction": "reduction of gradients",
}


@dataclass(frozen=True, slots=True)
class Where:
    """From where an operator is called."""

    module: str  # FQN of the module whose forward or backward calls it; empty for the model itself
    line: tuple[str, int, str] | None  # of the user's code: file, line and function
    in_backward: bool  # whether autograd's engine calls it
    # Whether torch chose the operator: C++ behind a function, or in backward autograd's formula, and neither
    # a module, a hook nor the user's own backward.
    by_torch: bool = False
    phase: Phase = ""  # of the step; empty for code of no module, whose phase is known by what ran before

    def __str__(self) -> str:
        line = " ({}:{} in {})".format(*self.line) if self.line else ""
        if self.phase in _PLACES and not self.module:
            return f"{_PLACES[self.phase]}{line}"
        of = f"module {self.module!r}" if self.module else "the model itself"
        return f"{_PLACES.get(self.phase, 'backward' if self.in_backward else 'forward')} of {of}{line}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an operator reads or makes, or that a step begins or ends with."""

    name: str  # of the argument or the result; or e.g. ``"weight of layers.0.bias"``
    kind: str  # its dtype and shape
    # 128 bits of its elements and their order, whatever its shape, as 32 hexadecimal digits, or where they
    # are yet; None if its memory was never written.
    digest: Any
    memory: int | None = None  # a number of the memory that holds it, which views share; None for none


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator on one rank."""

    operator: str
    where: Where  # from where it is called
    # What it reads: its tensors as :class:`Value`, or all arguments as the oracle compares them.
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]  # what it makes or writes, in the same form
    arguments: tuple[str, ...] = ()  # its arguments other than tensors, as text
    node: str = ""  # name of the node of the graph that calls it; empty in eager
    is_collective: bool = False  # whether other ranks take part
    position: int = 0  # in the step

    def __str__(self) -> str:
        return f"{self.operator} in the {self.where}{f', node {self.node}' if self.node else ''}"
