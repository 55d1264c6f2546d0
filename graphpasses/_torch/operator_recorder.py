"""A recorder of the operators that a block calls, below autograd: traced or computed, forward or backward."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import torch
from torch import nn
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, _higher_order_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F

# Modes are pushed by hand: TorchDispatchMode.__enter__ also sets flags of the process, which ranks that are threads
# would leave set, and which make Dynamo compile nothing. Tested: 2.13.
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from graphpasses._torch.operator_facts import NOT_THE_USERS
from graphpasses._torch.recorded_operator import Phase, Where

_TORCH = Path(torch.__file__).parent
OPTIMIZERS = str(_TORCH / "optim")
"""Where the files of torch's optimizers lie; the methods of all others are called from there."""
_FSDP2 = _TORCH / "distributed" / "fsdp" / "_fully_shard"
# Files whose calls are none of the step's own.
_LEFT_OUT = {
    # DTensor runs an operator that it has not met before on fake tensors, to learn the shapes of its results.
    str(_TORCH / "distributed" / "tensor" / "_sharding_prop.py"),
    # How FSDP2 gathers and reduces, and what a traced step does instead.
    *(str(_FSDP2 / f"_fsdp_{name}.py") for name in ("collectives", "param", "param_group")),
    str(Path(__file__).with_name("fsdp2_tracing.py")),
}
_WRAPPERS = 2  # functions that keep Dynamo from a mode: of `_fn` and `inner`. Tested: 2.13.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Functions that leave to C++ whether it adds in place: autograd's engine, and who calls `linear`. Tested: 2.13.
_CALL_LINEAR = ("_in_projection", "_in_projection_packed", "multi_head_attention_forward")
_CALLERS = {_ENGINE, nn.Linear.forward.__code__, *(getattr(F, name).__code__ for name in _CALL_LINEAR)}
_CALL_MODULE = nn.Module._wrapped_call_impl.__code__
_DEVICE = torch.ops.prim.device.default


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each operator that a block calls in this thread to :meth:`record`, which says what is kept of it.

    Calls on tensor subclasses are seen as what they become, on plain tensors. With ``is_mode`` the recorder is a
    mode, as the tracer is; while one is active, some of autograd's formulas are others, and a model may ask for
    modes. Without, eager takes no other path for it: operators, those of higher order as what they become, are seen
    by a key of the dispatcher that lies below autograd, and that nothing else uses.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, *, is_mode: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_mode = is_mode
        self._modules = {id(module): fqn for fqn, module in reversed([*model.named_modules()])}
        self._owners = {
            id(parameter): name.rpartition(".")[0]
            for name, parameter in reversed([*model.named_parameters(remove_duplicate=False)])
        }
        self._nodes: dict[int, Where] = {}

    @property
    def is_paused(self) -> bool:
        """Whether operators are not recorded now, see :func:`recording_paused`; not for a mode."""
        return getattr(_thread, "recorder", None) is not self

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> Any:
        """Calls an operator, keeps of the call what the record is for, and returns its results."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._root = sys._getframe(1)
        if self._is_mode:
            _python_dispatch._push_mode(self)
            return self
        _register()
        _thread.recorder = self
        self._guard = torch._C._IncludeDispatchKeyGuard(_KEY)
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_mode:
            _python_dispatch._pop_mode()
        else:
            self._guard.__exit__(None, None, None)
            del self._guard, _thread.recorder
        del self._root

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # what a fake tensor answers to C++, two or three times for each operator
            return args[0].device
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the call comes again, on the tensors inside
        return self.record(func, args, kwargs or {}, sys._getframe(_WRAPPERS + 1))

    def where(self, caller: FrameType) -> Where | None:
        """Returns from where the call is made that is made now; None if it is left out."""
        module = line = None
        in_optimizer = False
        frame = caller
        while frame is not self._root and frame.f_back is not None and (module is None or line is None):
            code = frame.f_code
            if code is _ENGINE:
                break  # what follows called backward, and is not what backward computes
            if code is _CALL_MODULE:
                module = self._modules.get(id(frame.f_locals["self"])) if module is None else module
            elif code.co_filename in _LEFT_OUT:
                return None
            elif code.co_filename.startswith(OPTIMIZERS):
                in_optimizer = True
            elif line is None and not code.co_filename.startswith(NOT_THE_USERS):
                line = code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        phase: Phase = "optimizer" if in_optimizer else "" if module is None else "forward"
        if node is None:
            is_torchs = caller.f_code in _CALLERS
            where = Where(module or "", line, in_backward=False, by_torch=is_torchs, phase=phase)
            # The node of autograd that this call is the forward of has been made by now.
            self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, where)
            return where
        owner = self._owners.get(id(getattr(node, "variable", None)), "")  # of the gradient that is added to
        forward = self._nodes.get(node._sequence_nr(), Where(owner, None, False))
        is_torchs, phase = module is None and line is None, "optimizer" if in_optimizer else "backward"
        fqn = forward.module if module is None else module
        return Where(fqn, line or forward.line, in_backward=True, by_torch=is_torchs, phase=phase)


@contextmanager
def unseen() -> Iterator[None]:
    """Hides the operators that a block calls."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        yield


@contextmanager
def recording_paused() -> Iterator[None]:
    """Lets the block, which traces, or computes on fake tensors, run as if no operators were recorded around it."""
    recorder = getattr(_thread, "recorder", None)
    if recorder is None:
        yield
        return
    include: Any = torch._C._dispatch_tls_set_dispatch_key_included
    include(_KEY, False)
    del _thread.recorder
    try:
        yield
    finally:
        _thread.recorder = recorder
        include(_KEY, True)


def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return _thread.recorder.record(func, args, kwargs, sys._getframe(1))


# No kernel is registered for it, and only a block above brings it into the dispatcher. Tested: 2.13.
_KEY = cast(torch._C.DispatchKey, torch._C._parse_dispatch_key("Fake"))
_KEYS = torch._C.DispatchKeySet(_KEY)
_thread = threading.local()


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Registers what sees the operators; it stays, as torch forgets no fallback, and is off outside of blocks."""
    # There DTensor runs an operator on fake tensors, whose kernels do not know the key.
    propagator: Any = ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    setattr(propagator, name, unseen()(getattr(propagator, name)))
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(_call, "Fake")  # type: ignore[no-untyped-call]
    # Of the results of these, which compute nothing, torch makes Python objects of other classes: parameters.
    aten = torch.library.Library("aten", "IMPL", "Fake")  # type: ignore[no-untyped-call]
    for name in ("detach", "alias"):
        aten.impl(name, torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    # Those of higher order have no fallbacks.
    _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for operator in _higher_order_ops.values():
        operator.fallthrough(_KEY)  # type: ignore[no-untyped-call]
    return library, aten
