"""Fake tensors: their mode, what operators see of them, results as kernels give them, and how to do without."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest import mock

import torch
from torch import _meta_registrations, _prims_common
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._guards import active_fake_mode as active_fake_mode
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch

from graphpasses._torch.fake_kernels import FAKE_RESULTS, unbind
from graphpasses._torch.symbols import indices_of_eager
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.gc_pause import objects_made_in_pause

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


def fake_mode_of(*values: Any) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor or symbolic size among ``values``; None without one."""
    for value in values:
        if isinstance(value, (list, tuple)):
            mode: FakeTensorMode | None = fake_mode_of(*value)
        elif isinstance(value, dict):
            mode = fake_mode_of(*value.values())
        else:
            mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def new_fake_mode() -> FakeTensorMode:
    """Returns a mode in which numbers that depend on data are symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def fake_copies(values: Iterable[Any]) -> list[Any]:
    """Returns fake tensors of known sizes in the place of tensors; fake tensors and other values stay."""
    mode = new_fake_mode()
    return [
        mode.from_tensor(value.detach(), static_shapes=True)
        if isinstance(value, torch.Tensor) and not is_fake(value)
        else value
        for value in values
    ]


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without values."""
    return isinstance(value, FakeTensor)


def fake_tensors_of(mode: FakeTensorMode) -> list[FakeTensor]:
    """Returns the tensors that a mode has made since the garbage collector was paused, and that are alive."""
    return [each for each in objects_made_in_pause() if type(each) is FakeTensor and each.fake_mode is mode]


# Operators whose decompositions, of which torch makes fake results, give other strides than their kernels. Each was
# found by running both on permuted tensors. Source: the `TORCH_META_FUNC`s of ATen's native kernels.
_LIKE_FIRST = {
    aten.elu_backward.default, aten.floor_divide.default, aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.logit_backward.default,
    aten.softplus_backward.default,
}  # fmt: skip
_CONTIGUOUS = {
    aten._log_softmax_backward_data.default, aten.huber_loss_backward.default, aten.log_sigmoid_forward.default,
    aten.mse_loss_backward.default, aten.native_layer_norm_backward.default, aten.smooth_l1_loss_backward.default,
}  # fmt: skip
# In the memory format that the input, the argument at this index, suggests.
_IN_FORMAT_OF = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}

_NORMS = (aten.native_batch_norm.default, aten.native_group_norm.default, aten.native_layer_norm.default)


@contextmanager
def watched_in_other_threads(on_call: Callable[[Any], None]) -> Iterator[None]:
    """Reports operators that other threads, where the active fake mode is not on, call on its tensors."""
    mode, thread, dispatch = active_fake_mode(), threading.get_ident(), FakeTensor.__torch_dispatch__

    def watched(
        cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            threading.get_ident() != thread
            and fake_mode_of(args, kwargs or {}) is mode
            and func.namespace != "prim"  # what is asked of a tensor, as its device
        ):
            on_call(func)
        return dispatch(func, types, args, kwargs or {})

    with mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(watched)):
        yield


class _Results(dict[Any, Any]):
    """Fake results by operator and arguments. Those of graphs, which have an id for an argument, must not be kept,
    nor what depends on whether gradients are on.
    """

    def __init__(self) -> None:
        self._of_graphs: list[Any] = []

    def __setitem__(self, key: Any, result: Any) -> None:
        if key.key[0] is aten.mkldnn_rnn_layer.default:
            return
        if not isinstance(key.key[0], torch._ops.OpOverload):
            self._of_graphs.append(key)
        super().__setitem__(key, result)

    def forget_graphs(self) -> None:
        """Drops those of graphs: when one is gone, torch tells its own cache alone."""
        while self._of_graphs:
            self.pop(self._of_graphs.pop(), None)


_RESULTS = _Results()  # of all blocks: a third of the time of a step that is like one traced before


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Gives fake results in the block the strides of the kernels, by which a ``reshape`` is a view or a copy."""
    strides: dict[Any, Callable[..., torch.Tensor]] = {
        **dict.fromkeys(_LIKE_FIRST, _like_first),
        **dict.fromkeys(_CONTIGUOUS, lambda value, *_: value.contiguous()),
        aten.native_dropout.default: lambda value, given, *_: value.clone() if value is given else value,
        **{operator: functools.partial(_in_format_of, index) for operator, index in _IN_FORMAT_OF.items()},
    }
    table = {op: _with_strides(decomposition_table[op], restride) for op, restride in strides.items()}
    table |= {op: _with_statistics(table.get(op, decomposition_table[op])) for op in _NORMS}
    table[aten.unbind.int] = unbind  # where sizes are symbols
    fakes: dict[Any, Any] = {
        operator: functools.partial(_view, op_implementations_dict[operator])
        for operator in (aten.view.default, aten._unsafe_view.default)
    }
    fakes |= dict.fromkeys(_NORMS, _norm) | FAKE_RESULTS
    replace: Any = mock.patch.object
    order = functools.partial(_dim_order, _prims_common.compute_elementwise_output_logical_to_physical_perm)
    grouped_mm = functools.partial(_grouped_mm, _meta_registrations._meta_grouped_mm_common)
    with (
        mock.patch.dict(decomposition_table, table),
        mock.patch.dict(op_implementations_dict, fakes),
        replace(_prims_common, "compute_elementwise_output_logical_to_physical_perm", order),
        replace(_meta_registrations, "_meta_grouped_mm_common", grouped_mm),
        replace(fake_tensor, "in_kernel_invocation_manager", _in_kernel),
        replace(FakeTensorMode, "cache", _RESULTS),  # torch's has the others
        indices_of_eager(),
    ):
        try:
            yield
        finally:
            _RESULTS.forget_graphs()


@contextmanager
def _in_kernel(mode: FakeTensorMode, torchs: Any = fake_tensor.in_kernel_invocation_manager) -> Iterator[None]:
    """Runs a fake kernel; where sizes are symbols, operators in it are Python's, as C++'s do not all take these."""
    has_symbols = mode.shape_env is not None and bool(mode.shape_env.var_to_range)
    with torchs(mode), enable_python_dispatcher() if has_symbols else nullcontext():
        yield


def _grouped_mm(
    torchs: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Multiplies groups of matrices of each dtype that the kernels take; torch's fake refuses all but bfloat16."""
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.float32):
        offsets, out_dtype = options.get("offs"), options.get("out_dtype")
        create: Any = _meta_registrations._create_grouped_mm_output_tensor
        return cast(torch.Tensor, create(a, b, offsets, out_dtype))
    return torchs(a, b, *args, **options)


def _view(
    torchs: Callable[..., FakeTensor], mode: FakeTensorMode, view: Any, tensor: FakeTensor, shape: Any
) -> FakeTensor:
    """Views a tensor with the strides of the kernel; those of dims with one element suggest a memory format."""
    is_plain = is_fake(tensor) and not tensor._has_symbolic_sizes_strides
    if not is_plain or any(isinstance(size, torch.SymInt) for size in shape):
        return torchs(mode, view, tensor, shape)
    with fake_tensor.in_kernel_invocation_manager(mode):
        result = view(tensor, shape)
    return FakeTensor(mode, result, tensor.device)


def _norm(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Normalises by torch's decomposition, but groups of one dtype, whose fake has the kernel's strides.

    That of torch 2.14 loses channels last.
    """
    is_groups = operator is aten.native_group_norm.default
    if is_groups and not _is_mixed(args) and RELEASE != (2, 14):
        return NotImplemented
    with mode:
        return decomposition_table[operator](*args, **kwargs)


def _is_mixed(args: Iterable[Any]) -> bool:
    return len({each.dtype for each in args if isinstance(each, torch.Tensor)}) > 1


def _dim_order(torchs: Callable[..., tuple[list[int], bool]], *tensors: Any, **options: Any) -> Any:
    """Orders the dims of what contiguous tensors of one shape give as the kernels do.

    Torch's fakes keep the strides of dims with one element where the tensors are contiguous in channels last, too.
    Source: ``TensorIteratorBase::compute_fast_setup_type``.
    """
    is_one_shape = len(tensors) > 1 and all(
        isinstance(each, torch.Tensor) and each.shape == tensors[0].shape for each in tensors
    )
    is_contiguous: Any = is_contiguous_for_memory_format_or_false
    if is_one_shape and all(is_contiguous(t, memory_format=torch.contiguous_format) for t in tensors):
        return list(range(tensors[0].dim())), False
    return torchs(*tensors, **options)


_SUM = 2  # of torch's reductions of a loss


def _with_strides(decomposition: Callable[..., Any], restride: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = decomposition(*args, **kwargs)
        except ZeroDivisionError:  # a mean of no elements, whose gradient has the shape of that of a sum
            gradient, value, target, _, *others = args
            result = decomposition(gradient, value, target, _SUM, *others)
        if isinstance(result, torch.Tensor):
            return restride(result, *args)
        # A backward that was not asked for a gradient returns None in its place.
        return tuple(None if each is None else restride(each, *args) for each in result)

    return call


def _with_statistics(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Gives statistics in float32 where parameters have another dtype than the input, as under autocast.

    Torch's have the input's. Source: ``is_mixed_type`` of ATen's kernels for the CPU.
    """

    @functools.wraps(decomposition)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, *statistics = decomposition(*args, **kwargs)
        return result, *(each.to(torch.float32) if _is_mixed(args) else each for each in statistics)

    return call


def _like_first(value: torch.Tensor, first: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(first, dtype=value.dtype) if _same_shape(value, first) else value.contiguous()


def _in_format_of(index: int, value: torch.Tensor, *args: Any) -> torch.Tensor:
    like = torch._prims_common.suggest_memory_format(args[index]) if _same_shape(value, args[index]) else None
    return value.contiguous(memory_format=like or torch.contiguous_format)


def _same_shape(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.dim() == other.dim() and value.shape == other.shape  # Python would compare sizes first


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Makes tensors real and calls untraced, as AOTAutograd's partitioner does to ask the other ranks.

    The Python dispatcher, which is on while AOTAutograd traces, keeps the GIL while an operator runs. A collective
    would then wait for gloo's queue, whose thread may hold it and wait for the GIL, to free what an earlier one used.
    """
    with no_dispatch(), real_tensors():
        yield


def fake_errors_unlogged() -> AbstractContextManager[Any]:
    """Lets torch not log what its functions for fake tensors raise, and so keep their frames."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Makes tensors real while a compiler traces; what is traced by itself meanwhile is traced.

    Also where a fake kernel asks for a value, in which operators that get no tensor make meta tensors.
    """
    with fake_tensor.unset_fake_temporarily(), no_python_dispatcher(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(False)
        yield
