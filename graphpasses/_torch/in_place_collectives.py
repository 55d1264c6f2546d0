"""Collectives that write into tensors, as ``torch.distributed.all_reduce``, while a step is traced."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.overrides import BaseTorchFunctionMode

from graphpasses._torch.operator_facts import tensors


def _reduce_scatter(output: Tensor, input_list: Sequence[Tensor], op: str = "sum", group: Any = None) -> None:
    joined = torch.cat([each.reshape(-1) for each in input_list])
    whole: Any = group or dist.group.WORLD
    reduced = functional.reduce_scatter_tensor(joined, op, 0, whole)
    output.copy_(reduced.view(output.shape))


def _scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """As an all-to-all to which one rank alone gives something."""
    group = group or dist.group.WORLD
    first = dist.get_group_rank(group, src or 0) if group_src is None else group_src
    is_first, num_ranks = dist.get_rank(group) == first, dist.get_world_size(group)
    received = [tensor.numel() if rank == first else 0 for rank in range(num_ranks)]
    sent = [tensor.numel() if is_first else 0] * num_ranks
    parts = [each.reshape(-1) for each in scatter_list or ()] if is_first else [tensor.new_empty(0)]
    tensor.copy_(functional.all_to_all_single(torch.cat(parts), received, sent, group).view(tensor.shape))


# All but the last two are what Dynamo traces in the place of each, too. Tested: 2.13.
_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "all_reduce": functional.all_reduce_inplace,
    "all_gather": functional.all_gather_inplace,
    "all_gather_into_tensor": functional.all_gather_tensor_inplace,
    "all_gather_single": functional.all_gather_tensor_inplace,  # which the former calls since torch 2.13
    "reduce_scatter_tensor": functional.reduce_scatter_tensor_inplace,
    "reduce_scatter_single": functional.reduce_scatter_tensor_inplace,
    "all_to_all_single": functional.all_to_all_inplace,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}

OBJECTS = "objects that ranks send each other"
AS_IT_LIES = "a collective that moves memory as it lies"
_MOVE_MEMORY = ("all_to_all_single", "reduce_scatter", "scatter")  # gloo's, past the strides of what they are given


def _refuse_objects(*_: Any) -> str:
    raise RuntimeError(OBJECTS)


@contextmanager
def collectives_with_waits() -> Iterator[None]:
    """Lets a collective that the user's code waits for be one that a graph knows, a wait, and a copy.

    It moves, or adds, the same. Autograd takes no notice of either. A mode of functions is on, under which torch
    looks for a collective by its name again: the user's code may have imported it under one of its own. One
    that sends objects raises :data:`OBJECTS`, one whose bytes eager puts elsewhere :data:`AS_IT_LIES`.
    """
    with BaseTorchFunctionMode(), _replacements:
        yield


class _Replacements:
    """Replaces the collectives while at least one thread is in the block.

    Ranks that are threads wait for each other within: they leave in another order than they came.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._patches = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                # What each collective of objects asks first, by whatever name it is called.
                self._put(distributed_c10d, "_get_object_coll_device", _refuse_objects)
                for name, traced in _FUNCTIONAL.items():
                    if hasattr(dist, name):
                        replaced = _replaced(getattr(dist, name), traced)
                        for module in (dist, distributed_c10d):
                            self._put(module, name, replaced)

    def _put(self, module: ModuleType, name: str, replaced: Callable[..., Any]) -> None:
        self._patches.enter_context(mock.patch.object(module, name, replaced))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._patches.close()


_replacements = _Replacements()


def _replaced(original: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        is_async = given.pop("async_op", False)
        if "op" in given:
            given["op"] = functional.REDUCE_OP_TO_STR.get(given["op"])
        if is_async or given.get("op", "") is None or _caller().startswith("torch.distributed.fsdp"):
            return original(*args, **kwargs)
        moved = tensors([*given.values()]) if original.__name__ in _MOVE_MEMORY else ()
        if not all(each.is_contiguous() for each in moved):
            raise RuntimeError(AS_IT_LIES)
        with torch.no_grad():
            traced(**given)
        return None

    return collective


def _caller() -> str:
    """Returns the module that calls a collective, past those by which torch comes back to it."""
    frame: Any = sys._getframe(2)
    while (name := str(frame.f_globals.get("__name__"))) in _WAY_BACK:
        frame = frame.f_back
    return name


_WAY_BACK = ("torch.overrides", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
