"""A record of the operators that a block calls, below autograd: traced or computed, forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

# Modes are pushed by hand: TorchDispatchMode.__enter__ also sets flags of the process, which ranks that are threads
# would leave set, and which make Dynamo compile nothing. Tested: 2.13.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.operator_facts import (
    NOT_THE_USERS,
    TensorFacts,
    facts_of_value,
    known_numbers,
    memory_of,
    numbers_of,
    read_tensors,
    tensors,
)
from graphpasses._torch.operator_rules import (
    LEFT_OUT,
    LIFT_FRESH,
    accumulates,
    arguments_to_save,
    computes_nothing,
    copies_nothing,
    one_hot,
    with_sources,
    writes_first,
)
from graphpasses._torch.recorded_operator import Operator, Where
from graphpasses._torch.tracing import outside_tracing

_WRAPPERS = 2  # functions that keep Dynamo from a mode: of `_fn` and `inner`. Tested: 2.13.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Functions that leave to C++ whether it adds in place: autograd's engine, and who calls `linear`. Tested: 2.13.
_CALLERS = {
    _ENGINE,
    nn.Linear.forward.__code__,
    *(
        getattr(F, name).__code__
        for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward")
    ),
}
FORMULA = -1
"""The position of calls of autograd's formulas, where these are not recorded."""
_CALL_MODULE = nn.Module._wrapped_call_impl.__code__


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a block calls, and undoes what they write into tensors and generators from outside.

    Left out is what computes nothing: views (a call that reads one is recorded with the memory, shape and strides
    that it reads), queries of a tensor's device and of its value, waits for collectives, marks for profilers. Left
    out are the copies, too, with which autograd gives a parameter its gradient, since a traced step leaves them to
    its caller; and what FSDP2 does to gather and reduce. Calls on tensor subclasses are recorded as what they become,
    on plain tensors.

    What torch's C++ computes in place, in memory of the step, is recorded as if it were out of place: while a mode is
    active, and for all but plain tensors, it is. So are additions of gradients of what is read twice.

    ``names`` are those of tensors from outside, the same in two records of one step. ``formulas`` says whether to
    record what autograd's formulas in C++ call; with ``only_undo`` no calls are recorded, only what :meth:`undo`
    needs.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, torch.Tensor],
        *,
        formulas: bool = True,
        only_undo: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas
        self._only_undo = only_undo
        self.calls: list[Operator] = []
        self._modules = {id(module): fqn for fqn, module in reversed([*model.named_modules()])}
        self._origins: dict[int, str | tuple[int, int]] = {}
        self._kept: list[StorageWeakRef] = []  # so that no other memory gets the address of one that is freed
        self._num_outside = 0
        self._nodes: dict[int, Where] = {}
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        for name, tensor in names.items():
            for each in read_tensors(tensor):
                self._origins[memory_of(each)] = name

    def state_at_first_use(self, generator: torch.Generator) -> torch.Tensor | None:
        """Returns the state of a generator from outside when the block first drew from it; None if it did not."""
        return self._generators.get(id(generator), (generator, None))[1]

    def undo_to(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Lets :meth:`undo` give a generator another state than it had at its first use."""
        self._generators[id(generator)] = generator, state

    def as_it_is(self, result: torch.Tensor | None) -> torch.Tensor | None:
        """Returns what a tensor holds now, also after :meth:`undo`."""
        is_written = result is not None and any(
            memory_of(each) in self._saved for each in read_tensors(result)
        )
        return result.clone() if result is not None and is_written else result

    def undo(self) -> None:
        """Writes back what tensors and generators from outside held before the block."""
        for memory, saved in self._saved.values():
            if memory.untyped_storage().nbytes() == saved.nbytes:  # FSDP2 frees what it has unsharded
                memory.copy_(saved)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def __enter__(self) -> OperatorCalls:
        self._root = sys._getframe(1)
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()
        del self._root

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the call comes again, on the tensors inside
        return self.record(func, args, kwargs or {}, sys._getframe(_WRAPPERS + 1))

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> Any:
        """Calls an operator, and records it."""
        if self._only_undo:
            self._save(func, args, kwargs)
            return func(*args, **kwargs)
        where = self._where(caller)
        if where is not None:
            self._save(func, args, kwargs)
        if copies_nothing(func, args):
            result = func(*args, **kwargs)
            self._made(result, self._origin(args[0]))
            return result
        if where is None or computes_nothing(func) or (where.line is None and accumulates()):
            results = func(*args, **kwargs)
            self._trace_origins(func, args, kwargs, results, None)
            return results
        if where.in_backward and where.by_torch and not self._formulas:
            results = func(*args, **kwargs)
            self._trace_origins(func, args, kwargs, results, FORMULA)
            return results
        inputs = (
            (numbers_of(args[0]),)
            if func is LIFT_FRESH
            else tuple(map(self._facts, (*args, *kwargs.values())))
        )
        results = func(*args, **kwargs)
        self._trace_origins(func, args, kwargs, results, len(self.calls))
        operator = str(func)
        if where.by_torch and writes_first(func) and not isinstance(self._origin(args[0]), str):
            operator = operator.replace("_.", ".", 1)
            self._made(args[0], (len(self.calls), 0))  # whoever reads this memory again reads something else
        flat = results if isinstance(results, (tuple, list)) else (results,)
        self.calls.append(Operator(operator, where, inputs, tuple(map(self._facts, flat))))
        if (found := one_hot(self.calls)) is not None:
            ids, num_calls = found
            del self.calls[-num_calls:]
            self._made(results, (len(self.calls), 0))
            self.calls.append(Operator("aten.one_hot.default", where, (ids,), (self._facts(results),)))
        return results

    def _trace_origins(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any, position: int | None
    ) -> None:
        """Notes of each result whether its memory is an argument's, or was made by the call at a position."""
        for index, (value, source) in enumerate(with_sources(func, args, kwargs, results)):
            if not isinstance(value, torch.Tensor):
                continue
            memory = memory_of(value)
            # A fake result of a constant, or of waiting, has new memory.
            if source is not None and memory_of(source) in self._origins:
                self._origins[memory] = self._origins[memory_of(source)]
            elif source is None and (
                func is LIFT_FRESH or memory not in map(memory_of, tensors((*args, *kwargs.values())))
            ):
                self._origins.pop(memory, None)
                if position is not None:
                    self._made(value, (position, index))

    def _made(self, tensor: torch.Tensor, origin: str | tuple[int, int]) -> None:
        self._origins[memory_of(tensor)] = origin
        if tensor.layout == torch.strided:
            self._kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def _save(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for index, name in arguments_to_save(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            if isinstance(value, torch.Generator):
                self._generators.setdefault(id(value), (value, value.get_state()))
            for tensor in tensors(value):
                key = memory_of(tensor)
                if (
                    isinstance(self._origins.get(key, ""), str)
                    and key not in self._saved
                    and not is_fake(tensor)
                ):
                    with outside_tracing():
                        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                        memory.set_(tensor.untyped_storage())
                        self._saved[key] = memory, memory.clone()

    def _facts(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                is_strided = value.layout == torch.strided
                return TensorFacts(
                    self._origin(value),
                    known_numbers((value.storage_offset(),))[0] if is_strided else None,
                    value.dtype,
                    value.device.type,
                    known_numbers(value.shape),
                    known_numbers(value.stride()) if is_strided else (),
                )
            case list() | tuple():
                return tuple(map(self._facts, value))
            case dict():
                return tuple((key, self._facts(each)) for key, each in value.items())
        return facts_of_value(value)

    def _origin(self, tensor: torch.Tensor) -> str | tuple[int, int]:
        if memory_of(tensor) not in self._origins:
            self._num_outside += 1
            self._made(tensor, f"tensor {self._num_outside} from outside")
        return self._origins[memory_of(tensor)]

    def _where(self, caller: FrameType) -> Where | None:
        """Returns module and user's line of the call that is made now, and whether backward makes it.

        None, if it is left out, see :data:`LEFT_OUT`.
        """
        module = line = None
        frame = caller
        while frame is not self._root and frame.f_back is not None and (module is None or line is None):
            code = frame.f_code
            if code is _ENGINE:
                break  # what follows called backward, and is not what backward computes
            if code is _CALL_MODULE:
                module = self._modules.get(id(frame.f_locals["self"])) if module is None else module
            elif code.co_filename in LEFT_OUT:
                return None
            elif line is None and not code.co_filename.startswith(NOT_THE_USERS):
                line = code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of autograd that this call is the forward of has been made by now.
            self._nodes.setdefault(
                torch.autograd._get_sequence_nr() - 1,
                where := Where(module or "", line, in_backward=False, by_torch=caller.f_code in _CALLERS),
            )
            return where
        forward = self._nodes.get(node._sequence_nr(), Where("", None, False))
        return Where(
            forward.module if module is None else module,
            line or forward.line,
            in_backward=True,
            by_torch=module is None and line is None,
        )


@contextmanager
def dispatch_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wraps, in the block, the functions by which a tracer, and a record, get each operator of torch."""

    def of_operators(call: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(call)

        def run(mode: Any, func: Any, *args: Any) -> Any:
            return (wrapped if isinstance(func, torch._ops.OpOverload) else call)(mode, func, *args)

        return run

    replace: Any = mock.patch.object
    dispatch = ProxyTorchDispatchMode.__torch_dispatch__
    with (
        replace(ProxyTorchDispatchMode, "__torch_dispatch__", of_operators(dispatch)),
        replace(OperatorCalls, "record", of_operators(OperatorCalls.record)),
    ):
        yield
