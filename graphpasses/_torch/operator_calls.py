"""A record of the operators that a block calls, below autograd: traced or computed, forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers an operator that is named below. Tested: 2.13.
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

# Modes are pushed by hand: TorchDispatchMode.__enter__ also sets flags of the process, which ranks that are threads
# would leave set, and which make Dynamo compile nothing. Tested: 2.13.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.operator_facts import Call, TensorFacts, Where
from graphpasses._torch.tracing import outside_tracing

__all__ = ["OperatorCalls", "read_tensors"]

_TORCH = str(Path(torch.__file__).parent)
_FSDP2 = Path(_TORCH, "distributed", "fsdp", "_fully_shard")
_NOT_THE_USERS = (_TORCH, str(Path(__file__).parents[1]), "<")
_CALL_MODULE = nn.Module._wrapped_call_impl.__code__
_LEFT_OUT = frozenset(
    {
        # DTensor runs an operator that it has not met before on fake tensors, to learn the shapes of its results.
        str(Path(_TORCH, "distributed", "tensor", "_sharding_prop.py")),
        # How FSDP2 gathers and reduces, and what a traced step does instead.
        *(str(Path(_FSDP2, f"_fsdp_{name}.py")) for name in ("collectives", "param", "param_group")),
        str(Path(__file__).with_name("fsdp2_tracing.py")),
    }
)
_QUERIES = (torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# In eager they are calls of Python.
_STATES = ("graphpasses.read_random_state.default", "graphpasses.set_random_state.default")
_NUM_NUMBERS = 64
_ONE_HOT = ["aten.zeros.default", "aten.scatter_.value"]
_ONE_HOT_TRACED = ["aten.arange.default", "aten.eq.Tensor", "aten._to_copy.default"]
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_WAITS = (
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops._c10d_functional._wrap_tensor_autograd.default,
)


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a block calls, and undoes what they write into tensors and generators from outside.

    Left out is what computes nothing: views (a call that reads one is recorded with the memory, shape and strides
    that it reads), queries of a tensor's device and of its value, waits for collectives, marks for profilers. Left
    out are the copies, too, with which autograd hands a parameter its gradient, since a traced step leaves them to
    its caller; and what FSDP2 does to gather and reduce. Calls on tensor subclasses are recorded as what they become,
    on plain tensors.

    Autograd adds out of place what it else adds in place, as it does for all but plain tensors, and while a mode like
    this one is active.

    Args:
        model: the model that the block runs.
        names: tensors from outside, by names that two records of one step share.
        only_undo: record no calls, only what :meth:`undo` needs.

    Example:
        >>> model, x = nn.Linear(2, 1), torch.ones(3, 2)
        >>> with OperatorCalls(model, {"x": x}) as record:
        ...     model(x).sum().backward()
        >>> [call.operator for call in record.calls if not call.where.in_backward]
        ['aten.addmm.default', 'aten.sum.default', 'aten.ones_like.default']
    """

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, names: Mapping[str, torch.Tensor], *, only_undo: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only_undo = only_undo
        self.calls: list[Call] = []
        self._modules = {id(module): fqn for fqn, module in reversed([*model.named_modules()])}
        self._origins: dict[int, str | tuple[int, int]] = {}
        self._kept: list[StorageWeakRef] = []  # so that no other memory gets the address of one that is freed
        self._num_outside = 0
        self._nodes: dict[int, Where] = {}
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        for name, tensor in names.items():
            for each in read_tensors(tensor):
                self._origins[_memory(each)] = name

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
        kwargs = kwargs or {}
        if self._only_undo:
            self._save(func, args, kwargs)
            return func(*args, **kwargs)
        where = self._where()
        if where is not None:
            self._save(func, args, kwargs)
        if where is None or _computes_nothing(func) or (where.line is None and _accumulates()):
            results = func(*args, **kwargs)
            self._trace_origins(func, args, kwargs, results, None)
            return results
        inputs = (
            (_numbers(args[0]),)
            if func is _LIFT_FRESH
            else tuple(map(self._facts, (*args, *kwargs.values())))
        )
        results = func(*args, **kwargs)
        self._trace_origins(func, args, kwargs, results, len(self.calls))
        flat = results if isinstance(results, (tuple, list)) else (results,)
        self.calls.append(Call(str(func), inputs, tuple(map(self._facts, flat)), where))
        self._merge_one_hot(results)
        return results

    def _trace_origins(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any, position: int | None
    ) -> None:
        """Notes of each result whether its memory is an argument's, or was made by the call at a position."""
        read = {_memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        for index, (value, source) in enumerate(_with_sources(func, args, kwargs, results)):
            if not isinstance(value, torch.Tensor):
                continue
            memory = _memory(value)
            # A fake result of a constant, or of waiting, has new memory.
            if source is not None and _memory(source) in self._origins:
                self._origins[memory] = self._origins[_memory(source)]
            elif source is None and (memory not in read or func is _LIFT_FRESH):
                self._origins.pop(memory, None)
                if position is not None:
                    self._made(value, (position, index))

    def _made(self, tensor: torch.Tensor, origin: str | tuple[int, int]) -> None:
        self._origins[_memory(tensor)] = origin
        if tensor.layout == torch.strided:
            self._kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def _merge_one_hot(self, result: Any) -> None:
        """Takes ``F.one_hot``'s two ways for one call: it writes ones into zeros, and compares where it is traced."""
        names = [call.operator for call in self.calls[-3:]]
        if names == _ONE_HOT_TRACED:
            ids, num_calls = self.calls[-2].inputs[0], 3
        elif names[-2:] == _ONE_HOT and self.calls[-1].inputs[3] == 1:
            ids, num_calls = self.calls[-1].inputs[2], 3 if names[0] == "aten.aminmax.default" else 2
        else:
            return
        where = self.calls[-1].where
        del self.calls[-num_calls:]
        self._made(result, (len(self.calls), 0))
        self.calls.append(Call("aten.one_hot.default", (ids,), (self._facts(result),), where))

    def _save(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
        for index, argument in enumerate(arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Generator):
                self._generators.setdefault(id(value), (value, value.get_state()))
            # Batch norms do not say that they write these.
            if not argument.name.startswith("running_") and not getattr(
                argument.alias_info, "is_write", False
            ):
                continue
            for tensor in _tensors(value):
                key = _memory(tensor)
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
                key = _memory(value)
                if key not in self._origins:
                    self._num_outside += 1
                    self._made(value, f"tensor {self._num_outside} from outside")
                return TensorFacts(
                    self._origins[key],
                    _number(value.storage_offset()) if value.layout == torch.strided else None,
                    value.dtype,
                    value.device.type,
                    tuple(map(_number, value.shape)),
                    tuple(map(_number, value.stride())) if value.layout == torch.strided else (),
                )
            case list() | tuple():
                return tuple(map(self._facts, value))
            case dict():
                return tuple((key, self._facts(each)) for key, each in value.items())
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return None
            case torch.Generator() | torch.fx.GraphModule():
                return type(value).__name__
            case bool() | int() | float() | complex() | str() | None:
                return value
            case torch.dtype() | torch.layout() | torch.memory_format():
                return value
            case torch.device():
                return value.type
        return type(value).__name__

    def _where(self) -> Where | None:
        """Returns module and user's line of the call that is made now, and whether backward makes it.

        None, if it is left out, see :data:`_LEFT_OUT`.
        """
        module = line = None
        frame = sys._getframe(2)
        while frame is not self._root and frame.f_back is not None and (module is None or line is None):
            code = frame.f_code
            if code is _CALL_MODULE:
                module = self._modules.get(id(frame.f_locals["self"])) if module is None else module
            elif code.co_filename in _LEFT_OUT:
                return None
            elif line is None and not code.co_filename.startswith(_NOT_THE_USERS):
                line = code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of autograd that this call is the forward of has been made by now.
            self._nodes.setdefault(
                torch.autograd._get_sequence_nr() - 1, where := Where(module or "", line, False)
            )
            return where
        forward = self._nodes.get(node._sequence_nr(), Where("", None, False))
        return Where(forward.module if module is None else module, line or forward.line, True)


def read_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that a tensor is made of: itself, or those inside of a subclass.

    Args:
        value: a tensor, e.g. a DTensor.
    """
    if is_traceable_wrapper_subclass_type(type(value)):
        for name in value.__tensor_flatten__()[0]:
            inner = getattr(value, name)
            if isinstance(inner, torch.Tensor):
                yield from read_tensors(inner)
    else:
        yield value


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the first numbers of a tensor that Python made of numbers."""
    if is_fake(tensor):
        return None
    with outside_tracing():
        return tuple(tensor.flatten()[:_NUM_NUMBERS].tolist())


@cache
def _computes_nothing(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func is _LIFT_FRESH:
        return False
    is_view = bool(func._schema.returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
    )
    return (
        is_view or func in _WAITS or func in _QUERIES or func.namespace == "profiler" or str(func) in _STATES
    )


def _accumulates() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == _ACCUMULATE


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in _leaves(value) if isinstance(each, torch.Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _with_sources(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any
) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """Yields each result, with the argument whose memory it has according to the operator's schema."""
    if func in _WAITS:
        yield results, args[0]
        return
    schema = func._schema if isinstance(func, torch._ops.OpOverload) and func is not _LIFT_FRESH else None
    sources: dict[str, torch.Tensor] = {}
    for index, argument in enumerate(schema.arguments if schema else ()):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(value, torch.Tensor):
            sources.update(dict.fromkeys(argument.alias_info.before_set, value))
    several = schema is not None and len(schema.returns) > 1
    for index, value in enumerate(results if several else [results]):
        alias = schema.returns[index].alias_info if schema and schema.returns else None
        source = next(
            (sources[name] for name in (alias.before_set if alias else ()) if name in sources), None
        )
        yield from ((each, source) for each in _leaves(value))


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
