"""A record of the operators that a block calls, to compare with another's, and to undo what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch import operator_facts as facts
from graphpasses._torch.fake_mode import is_fake, outside_tracing
from graphpasses._torch.operator_facts import LIFT_FRESH, TensorFacts, memory_of, read_tensors, tensors
from graphpasses._torch.operator_recorder import OperatorRecorder
from graphpasses._torch.recorded_operator import Operator
from graphpasses._torch.schemas import bound_arguments, written_names

FORMULA = -1
"""The position of calls of autograd's formulas, where these are not recorded."""


class OperatorCalls(OperatorRecorder):  # type: ignore[no-untyped-call]
    """Records the operators that a block calls, and undoes what they write into tensors and generators from outside.

    Left out is what computes nothing, as views, whose memory, shape and strides are recorded where they are read; the
    copies with which autograd gives a parameter its gradient; and what FSDP2 does to gather and reduce. What torch's
    C++ computes in place in memory of the step, as sums of gradients, is recorded as if it were out of place, which
    it is for a mode.

    ``names`` are those of tensors from outside, the same in two records of one step. ``formulas`` says whether to
    record what autograd's formulas in C++ call; with ``only_undo`` nothing is recorded but what :meth:`undo` needs.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, torch.Tensor],
        *,
        is_mode: bool = True,
        formulas: bool = True,
        only_undo: bool = False,
    ) -> None:
        super().__init__(model, is_mode=is_mode)
        self._formulas = formulas
        self._only_undo = only_undo
        self.calls: list[Operator] = []
        self._origins: dict[int, str | tuple[int, int]] = {}
        self._kept: list[StorageWeakRef] = []  # so that no other memory gets the address of one that is freed
        self._num_outside = 0
        # By memory: the tensor that was written first, with its place there, and all bytes, live and saved.
        self._saved: dict[int, tuple[torch.Tensor, tuple[Any, ...], torch.Tensor, torch.Tensor]] = {}
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
        is_written = result is not None and any(memory_of(each) in self._saved for each in read_tensors(result))
        return result.clone() if result is not None and is_written else result

    def undo(self) -> None:
        """Writes back what tensors and generators from outside held before the block."""
        for tensor, place, memory, saved in self._saved.values():
            if tensor.shape != place[1]:  # resized in place
                memory.untyped_storage().resize_(saved.nbytes)
                with torch.no_grad():
                    tensor.set_(memory.untyped_storage(), *place)
            if memory.untyped_storage().nbytes() == saved.nbytes:  # FSDP2 frees what it has unsharded
                memory.copy_(saved)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> Any:
        """Calls an operator, and records it."""
        if self._only_undo:
            self._save(func, args, kwargs)
            return func(*args, **kwargs)
        where = self.where(caller)
        if where is not None:
            self._save(func, args, kwargs)
        if facts.copies_nothing(func, args):
            result = func(*args, **kwargs)
            self._made(result, self._origin(args[0]))
            return result
        is_left_out = where is None or facts.computes_nothing(func) or (where.line is None and facts.accumulates())
        if where is None or is_left_out or (where.in_backward and where.by_torch and not self._formulas):
            results = func(*args, **kwargs)
            self._trace_origins(func, args, kwargs, results, None if is_left_out else FORMULA)
            return results
        if func is not LIFT_FRESH:
            inputs = tuple(map(self._facts, facts.arguments(func, args, kwargs)))
        elif unknown := facts.take_traced_numbers(self.calls):  # in eager Python makes it
            inputs = (unknown,)
        else:
            inputs = (facts.numbers_of(args[0]),)
        results = func(*args, **kwargs)
        self._trace_origins(func, args, kwargs, results, len(self.calls))
        operator = str(func)
        if where.by_torch and facts.writes_first(func) and not isinstance(self._origin(args[0]), str):
            operator = operator.replace("_.", ".", 1)
            self._made(args[0], (len(self.calls), 0))  # whoever reads this memory again reads something else
        flat = results if isinstance(results, (tuple, list)) else (results,)
        self.calls.append(Operator(operator, where, inputs, tuple(map(self._facts, flat))))
        if (found := facts.one_hot(self.calls)) is not None:
            ids, num_calls = found
            del self.calls[-num_calls:]
            self._made(results, (len(self.calls), 0))
            self.calls.append(Operator("aten.one_hot.default", where, (ids,), (self._facts(results),)))
        return results

    def _trace_origins(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any, position: int | None
    ) -> None:
        """Notes of each result whether its memory is an argument's, or was made by the call at a position."""
        for index, (value, source) in enumerate(facts.with_sources(func, args, kwargs, results)):
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
        """Saves generators, and what the arguments hold that a call writes."""
        for argument, value in bound_arguments(func, args, kwargs):
            if isinstance(value, torch.Generator):
                self._generators.setdefault(id(value), (value, value.get_state()))
            for tensor in tensors(value) if argument.name in written_names(func) else ():
                key = memory_of(tensor)
                if isinstance(self._origins.get(key, ""), str) and key not in self._saved and not is_fake(tensor):
                    with outside_tracing():
                        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                        memory.set_(tensor.untyped_storage())
                        place = tensor.storage_offset(), tensor.shape, tensor.stride()
                        self._saved[key] = tensor, place, memory, memory.clone()

    def _facts(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                is_strided, shape = value.layout == torch.strided, facts.known_numbers(value.shape)
                place = (value.storage_offset(), *value.stride()) if is_strided else (None,)
                offset, *stride = facts.known_numbers(place)
                kind = value.dtype, value.device.type
                return TensorFacts(self._origin(value), offset, *kind, shape, tuple(stride))
            case list() | tuple():
                return tuple(map(self._facts, value))
            case dict():
                return tuple((key, self._facts(each)) for key, each in value.items())
        return facts.facts_of_value(value)

    def _origin(self, tensor: torch.Tensor) -> str | tuple[int, int]:
        if memory_of(tensor) not in self._origins:
            self._num_outside += 1
            self._made(tensor, f"tensor {self._num_outside} from outside")
        return self._origins[memory_of(tensor)]


@contextmanager
def dispatch_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wraps, in the block, the functions by which a tracer, and a record, get each operator of torch."""

    def of_operators(call: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(call)

        def run(mode: Any, func: Any, *args: Any) -> Any:
            return (wrapped if isinstance(func, torch._ops.OpOverload) else call)(mode, func, *args)

        return run

    dispatch = ProxyTorchDispatchMode.__torch_dispatch__
    with (
        mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", of_operators(dispatch)),
        mock.patch.object(OperatorCalls, "record", of_operators(OperatorCalls.record)),
    ):
        yield
