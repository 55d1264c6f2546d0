"""Quick fake results of simple operators.

What an operator's meta kernel makes of tensors depends on their facts alone, and the layers of a model are alike: a
call is made once, on meta tensors, and its result described; fake tensors are made of the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# FakeTensor: made of a meta tensor, it shares its memory. Dispatched to their mode, a call takes ten times as long.
# `_make_subclass` is what its constructor calls. Tested: 2.13.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphpasses._torch.fake_mode import FakeFacts, facts_of_fake

__all__ = ["fake_call"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

# What FakeTensorMode does by running the meta kernel alone, with the device of the inputs.
_BY_META_KERNEL = frozenset(
    {
        aten._chunk_cat.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.div.Scalar,
        aten.reshape.default,
        aten.split_with_sizes.default,
        aten.split_with_sizes_copy.default,
        aten.view.default,
        aten.view.dtype,
        collectives.all_gather_into_tensor.default,
        collectives.all_reduce.default,
        collectives.reduce_scatter_tensor.default,
        collectives.wait_tensor.default,
    }
)
_PLAIN = frozenset({float, int, str, torch.dtype})


class _Part(NamedTuple):
    """A tensor of a result: what it is, and the number of its memory, after those of the arguments if it is new."""

    memory: int
    num_bytes: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _UnknownArgumentError(Exception):
    """The mode has to make the call."""


def fake_call(mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator on fake tensors, as under their mode.

    Args:
        mode: of the fake tensors.
        target: the operator.
        args: its arguments.
        kwargs: its keyword arguments; the quick way knows ``dtype``.
    """
    if target in _BY_META_KERNEL and kwargs.keys() <= {"dtype"}:
        tensors: list[FakeTensor] = []
        try:
            keys = [_key(arg, tensors) for arg in args]
        except _UnknownArgumentError:
            pass
        else:
            if len({tensor.device for tensor in tensors}) == 1:
                return _make(mode, _call_on_meta(target, *keys, **kwargs), tensors)
    with mode:
        return target(*args, **kwargs)


def _key(argument: Any, tensors: list[FakeTensor]) -> Any:
    """Returns the facts of an argument, which has a hash; adds its tensors to a list."""
    kind = type(argument)
    if kind is FakeTensor:
        facts = facts_of_fake(argument)
        if not isinstance(facts, FakeFacts) or facts.requires_grad or facts.is_conj or facts.is_neg:
            raise _UnknownArgumentError
        tensors.append(argument)
        return facts
    if kind in _PLAIN:
        return argument
    if isinstance(argument, (list, tuple)):
        if all(type(each) is int for each in argument):
            return tuple(argument)
        if all(type(each) is FakeTensor for each in argument):
            return tuple([_key(each, tensors) for each in argument])
    raise _UnknownArgumentError


@lru_cache(maxsize=4096, typed=True)
def _call_on_meta(target: Any, *keys: Any, **kwargs: Any) -> _Part | list[_Part]:
    """Describes what an operator makes of tensors with such facts."""
    # As in a kernel: neither modes nor autograd.
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        tensors: list[torch.Tensor] = []
        result = target(*[_on_meta(key, tensors) for key in keys], **kwargs)
        numbers: dict[int, int] = {}
        for tensor in tensors:
            numbers[tensor.untyped_storage()._cdata] = len(numbers)

        def part(value: torch.Tensor) -> _Part:
            memory = value.untyped_storage()
            number = numbers.setdefault(memory._cdata, len(numbers))
            offset = int(value.storage_offset())
            return _Part(number, memory.nbytes(), value.dtype, offset, value.shape, value.stride())

        return part(result) if isinstance(result, torch.Tensor) else [part(each) for each in result]


def _on_meta(key: Any, tensors: list[torch.Tensor]) -> Any:
    if type(key) is FakeFacts:
        tensors.append(_tensor(_memory(key.num_bytes), key.dtype, key.offset, key.shape, key.stride))
        return tensors[-1]
    return [_on_meta(each, tensors) for each in key] if type(key) is tuple else key


def _make(mode: FakeTensorMode, result: _Part | list[_Part], tensors: list[FakeTensor]) -> Any:
    memories = dict(enumerate([tensor.untyped_storage() for tensor in tensors]))
    parts = [result] if isinstance(result, _Part) else result
    made = []
    with torch._C._DisableTorchDispatch():
        for number, num_bytes, dtype, offset, shape, stride in parts:
            if number not in memories:
                memories[number] = _memory(num_bytes)
            tensor = _tensor(memories[number], dtype, offset, shape, stride)
            made.append(_fake(mode, tensor, tensors[0]))
    return made[0] if isinstance(result, _Part) else made


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, like: FakeTensor) -> FakeTensor:
    """Makes a fake tensor of a meta tensor, on the device of another of its mode."""
    state = like.__dict__
    if [name for name, value in state.items() if value is not None] != ["_fake_device", "fake_mode"]:
        return FakeTensor(mode, tensor, like.device)
    # It has nothing else, nor has the new one, whose constructor takes five times as long to say so.
    device = state["_fake_device"]
    made = torch.Tensor._make_subclass(
        FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(state)
    return made


def _memory(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()


def _tensor(memory: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, shape, stride)
