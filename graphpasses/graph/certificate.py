"""What is proved of a rewritten step, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Certificate"]


@dataclass(frozen=True)
class Certificate:
    """What is proved of a rewritten step; true if nothing is left open.

    Args:
        proved: the outputs and the written tensors that have the bits that they had: the loss, gradients by FQN,
            buffers.
        unproved: what no rule could follow, and why.
        axioms: what the proof takes for granted, by name.
        launches: the collectives, in order, as all ranks must have them: operator, group, dtype, size and what is
            sent.
        seconds: that it took.
    """

    proved: tuple[str, ...]
    unproved: tuple[tuple[str, str], ...]
    axioms: Mapping[str, str]
    launches: tuple[str, ...]
    seconds: float

    def __bool__(self) -> bool:
        return not self.unproved

    def summary(self) -> list[str]:
        """Returns what is proved and what is not, without what is taken for granted."""
        count = f"{len(self.proved)} values proved equal in bits, {len(self.unproved)} not proved"
        return [
            f"{count} ({self.seconds * 1e3:.0f} ms)",
            *(f"not proved: {n}: {why}" for n, why in self.unproved),
        ]

    def __str__(self) -> str:
        granted = [f"taken for granted: {name}: {statement}" for name, statement in self.axioms.items()]
        return "\n  ".join([*self.summary(), *granted])
