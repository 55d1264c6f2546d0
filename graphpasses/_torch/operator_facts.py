"""What is compared of the arguments and results of an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.schemas import inner_names
from graphpasses._torch.tracing import outside_tracing

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""How the paths of files begin that are not the user's own."""
_NUM_NUMBERS = 64


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is compared of a tensor."""

    # Where its memory comes from: a name, or the position of the call that made it and of its result.
    origin: str | tuple[int, int]
    offset: int | None  # in that memory, in elements
    dtype: torch.dtype
    device: str  # its kind of device
    shape: tuple[int | None, ...]  # its sizes; None where a size depends on data
    stride: tuple[int | None, ...]  # its strides; None where they depend on data

    def __str__(self) -> str:
        return kind_of(self)


def kind_of(tensor: torch.Tensor | TensorFacts) -> str:
    """Returns the dtype and shape of a tensor as text."""
    sizes = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def read_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that a tensor is made of: itself, or those inside of a subclass."""
    if is_traceable_wrapper_subclass_type(type(value)):
        for name in inner_names(value):
            inner = getattr(value, name)
            if isinstance(inner, torch.Tensor):
                yield from read_tensors(inner)
    else:
        yield value


def numbers_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the first numbers of a tensor that Python made of numbers; None for a fake one."""
    if is_fake(tensor):
        return None
    with outside_tracing():
        return tuple(tensor.flatten()[:_NUM_NUMBERS].tolist())


def facts_of_value(value: Any) -> Any:
    """Returns what is compared of an argument that is no tensor and no list."""
    match value:
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return None
        case bool() | int() | float() | complex() | str() | None:
            return value
        case torch.dtype() | torch.layout() | torch.memory_format():
            return value
        case torch.device():
            return value.type
    return type(value).__name__


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors in a value."""
    return (each for each in leaves(value) if isinstance(each, torch.Tensor))


def leaves(value: Any) -> Iterator[Any]:
    """Yields what lists and tuples hold."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def memory_of(tensor: torch.Tensor) -> int:
    """Returns a number for the memory that a tensor reads, shared by its views."""
    if tensor.layout != torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


def known_numbers(values: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns sizes or strides; None for each that depends on data."""
    return tuple([value if isinstance(value, int) else None for value in values])
