"""What is compared of the operators that two steps call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Call", "TensorFacts", "Where"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is compared of a tensor.

    Args:
        origin: where its memory comes from: a name, or the position of the call that made it and of its result.
        offset: in that memory, in elements.
        dtype: its dtype.
        device: its kind of device.
        shape: its sizes; None where a size depends on data.
        stride: its strides; likewise.
    """

    origin: str | tuple[int, int]
    offset: int | None
    dtype: torch.dtype
    device: str
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True, slots=True)
class Where:
    """From where an operator is called.

    Args:
        module: FQN of the module whose forward, or whose backward, calls it.
        line: of the user's code: file, line and function.
        in_backward: whether autograd's engine calls it.
    """

    module: str
    line: tuple[str, int, str] | None
    in_backward: bool

    def __str__(self) -> str:
        line = " ({}:{} in {})".format(*self.line) if self.line else ""
        of = f"module {self.module!r}" if self.module else "the model itself"
        return f"{'backward' if self.in_backward else 'forward'} of {of}{line}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Args:
        operator: its name.
        inputs: its arguments, keywords last; tensors as :class:`TensorFacts`.
        outputs: its results.
        where: from where it is called.
    """

    operator: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    where: Where
