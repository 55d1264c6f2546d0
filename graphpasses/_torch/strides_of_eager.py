"""Strides that eager's kernels give their results, for fake ones, and for those of a graph, which may have others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphpasses._torch.operator_facts import PLAIN
from graphpasses._torch.pytree import tree_leaves, tree_map
from graphpasses._torch.schemas import returns_alias

Strides = Mapping[Any, tuple[tuple[int, ...] | None, ...]]
"""Of a call, by what it is given, those of its results."""


class StridesOfEager(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the strides of what operators make in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not returns_alias(func) and (key := _key(func, args, kwargs or {})) is not None:
            self.found[key] = _strides_of(results)
        return results

    def differs_from(self, graph: fx.Graph) -> bool:
        """Whether a graph was traced with other strides of a call."""
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
                ours, theirs = _strides_of(node.meta.get("val")), self.found.get(_key(node.target, args, kwargs))
                pairs = zip(ours, theirs or (), strict=False)
                if any(one != two for one, two in pairs if one is not None and two is not None):
                    return True
        return False


@contextmanager
def strides_known(known: Strides) -> Iterator[None]:
    """Gives fake results in the block the strides of eager's, where the call is one of eager's."""
    dispatch: Callable[..., Any] = FakeTensorMode.dispatch

    def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = dispatch(mode, func, types, args, kwargs or {})
        if returns_alias(func) or (key := _key(func, args, kwargs or {})) not in known:
            return results
        strides = iter(known[key])

        def restrided(each: Any) -> Any:
            its = next(strides, None)
            if its is None or _strides_of(each)[0] in (None, its):
                return each
            made = {"dtype": each.dtype, "device": each.device}
            return dispatch(mode, torch.ops.aten.empty_strided.default, (), (each.shape, its), made)

        return tree_map(restrided, results)

    with mock.patch.object(FakeTensorMode, "dispatch", run) if known else nullcontext():
        yield


def views_to_hide() -> Collection[int]:
    """Returns the places of a forward graph's results that are views of what it computed, and leaves them to
    ``hide_view``: AOTAutograd gives dims of size 1 other strides, by which a convolution may write channels last.
    """
    context = TracingContext.try_get()
    whole: Any = None if context is None else context.fw_metadata
    if whole is None:
        return ()
    places = {len(whole.mutated_inp_runtime_indices) + index for index in whole.unsafe_view_out_indices}
    whole.unsafe_view_out_indices, whole.num_unsafe_view_outputs = [], 0
    return places


def hide_view(result: Tensor) -> Tensor:
    """Returns a tensor in the same memory that is no view to autograd, which lets nobody write some."""
    hidden: Tensor = torch.ops.aten._unsafe_view(result, result.shape)
    return hidden.as_strided_(result.shape, result.stride())


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _strides_of(results: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the strides of results; None for one that a backward was told to leave out, or whose sizes vary."""

    def strides(each: Any) -> tuple[int, ...] | None:
        numbers = (*each.shape, *each.stride()) if _is_strided(each) else (None,)
        return tuple(each.stride()) if all(isinstance(number, int) for number in numbers) else None

    return tuple(map(strides, tree_leaves(results)))


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what a call is given, of tensors kinds, sizes and strides; None where a size is no number."""
    found: list[Any] = [func]
    for each in tree_leaves((args, kwargs)):
        is_strided = _is_strided(each)
        found += (each.dtype, each.device.type, *each.shape, "strides", *each.stride()) if is_strided else (each,)
    return tuple(found) if all(isinstance(each, (*PLAIN, torch.device)) for each in found[1:]) else None
