"""Integers that running tells, by which the user's code indexes: ``x[scores.argmax()]``, ``x[:lengths[0]]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types

from graphpasses._torch.pytree import tree_map
from graphpasses.capture.lstms import lstm_in_onednn, varies_in_onednn

# Of one element; that of a byte is a mask.
_WHOLE = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
_PLAIN = (int, EllipsisType, torch.SymInt, type(None))


class IndexesTraced(TorchFunctionMode):
    """Lets the block select, and cut, by integers that a step computes, and by those of its batch.

    torch asks such an index for its value when a tensor is indexed by it, which is no decision: eager calls
    ``aten.select`` and ``aten.slice``, and so does the block. Nor is it one to make a tensor of numbers
    (``torch.tensor([n / 10, 1.0])``). ``is_fixed`` tells of a number whether it is the same at each step.
    ``ways_decided`` surrounds each call of a function.
    """

    def __init__(
        self,
        is_fixed: Callable[[torch.SymInt], bool],
        ways_decided: Callable[[Any, Any, Any], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._is_fixed = is_fixed
        self._ways_decided = ways_decided

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, or selects what it would."""
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            if _has_numbers(given):
                view = self._selected(args[0], given)
                if func is torch.Tensor.__getitem__:
                    return view
                view[...] = args[2]
                return None
        if func is torch.lstm and varies_in_onednn(*args):
            return lstm_in_onednn(*args)
        if (made := _made_of_numbers(func, args, kwargs or {})) is not None:
            return made
        with self._ways_decided(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))

    def _selected(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
        """Applies an index one by one, by the operators that torch calls."""
        num_left, dim = sum(each is not None and each is not ... for each in index), 0
        for each in index:
            if each is ...:
                dim = tensor.dim() - num_left
            elif each is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            else:
                num_left -= 1
                if not isinstance(each, slice):
                    tensor = tensor.select(dim, self._number(each))
                elif not _is_all(each, tensor.shape[dim]):
                    part = slice(*map(self._number, _ends(each)))
                    tensor, dim = tensor[(*(slice(None),) * dim, part)], dim + 1
                else:
                    dim += 1
        return tensor

    def _number(self, value: Any) -> Any:
        number = value.item() if isinstance(value, torch.Tensor) else value
        return int(number) if isinstance(number, torch.SymInt) and self._is_fixed(number) else number


def _made_of_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the tensor that a function makes of a number, or a list, some of which are traced; None of others."""
    like = args[0] if func is torch.Tensor.new_tensor else None
    if func not in _MAKES or not kwargs.keys() <= {"dtype", "device"} or len(args) != 1 + (like is not None):
        return None
    numbers, shape = _flat(args[-1])
    if shape is None or not any(isinstance(each, py_sym_types) for each in numbers):
        return None
    if not any(isinstance(each, (torch.SymInt, torch.SymFloat)) for each in numbers):  # truths, which decide
        decided: torch.Tensor = func(*tree_map(_decided, tuple(args)), **kwargs)
        return decided
    if not all(type(each) in _COUNTED for each in numbers):
        return None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    has_floats = any(type(each) in (float, torch.SymFloat) for each in numbers)
    of_others = dtype or (torch.get_default_dtype() if has_floats else torch.int64)
    each_one = [
        torch.full((), each, dtype=dtype if isinstance(each, torch.SymFloat) else of_others, device=device)
        for each in numbers
    ]
    made = torch.stack(each_one).view(shape) if shape else each_one[0]
    lifted: torch.Tensor = torch.ops.aten.lift_fresh.default(made)
    return lifted


def _decided(number: Any) -> Any:
    return bool(number) if isinstance(number, torch.SymBool) else number


_MAKES = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
_COUNTED = (int, float, bool, torch.SymInt, torch.SymFloat)


def _flat(data: Any) -> tuple[list[Any], tuple[int, ...] | None]:
    """Returns what nested lists hold, and their shape; None if they are no tensor's."""
    if not isinstance(data, (list, tuple)):
        return [data], ()
    parts = [_flat(each) for each in data]
    shapes = {shape for _, shape in parts}
    inner = shapes.pop() if len(shapes) == 1 else None
    return [each for numbers, _ in parts for each in numbers], None if inner is None else (len(data), *inner)


def _has_numbers(index: tuple[Any, ...]) -> bool:
    """Whether an index has a number that torch would ask for, and no tensors of several."""
    numbers = [end for each in index for end in (_ends(each) if isinstance(each, slice) else [each])]
    return all(type(each) in _PLAIN or _is_whole(each) for each in numbers) and (
        any(isinstance(each, torch.Tensor) for each in numbers) or any(type(each) is torch.SymInt for each in index)
    )


def _ends(each: slice) -> tuple[Any, Any, Any]:
    return each.start, each.stop, each.step


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _WHOLE


def _is_all(each: slice, size: int) -> bool:
    """Whether a slice is a whole dim, for which torch calls nothing."""
    if any(type(number) not in (int, type(None)) for number in (*_ends(each), size)):
        return each.start is each.stop is each.step is None
    return each.indices(size) == (0, size, 1)
