"""What an update reads of its optimizer's numbers when it runs, what the optimizer decides by them, and leaves."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.types import py_sym_types

from graphpasses._torch.conditions import as_function
from graphpasses._torch.pytree import tree_map
from graphpasses._torch.symbols import decided_by_values
from graphpasses._torch.traced_floats import StandIn, floats_stay_open, functions_traced
from graphpasses.graph import GraphInput, InputKind
from graphpasses.state.arithmetic import Arithmetic, Call, Number, Place, as_python


class TracedNumbers:
    """The numbers of optimizers' groups and state, and tensors in their places, while its step is traced.

    Python computes with stand-ins: each has its number's value, and notes what it is used for. What is decided by a
    number is a decision; what an operator of torch gets is traced as a number that a tensor holds. A fused kernel
    takes numbers, which a trace keeps as they are: there each is a number by which it is found again.

    Args:
        values: what traced numbers are now.
        fused: the indexes of the groups that a fused kernel updates.
    """

    def __init__(self, values: Mapping[Number, Any], fused: Collection[int]) -> None:
        self.values = {number: as_python(value) for number, value in values.items()}
        self._fused = fused
        self._symbols: dict[sympy.Symbol, Number] = {}
        self._marks: dict[Number, _Mark] = {}
        self._tensors: dict[Number, torch.Tensor] = {}
        self._inputs: dict[Number, Place] = {}
        self._numbers: dict[Place, Number] = {}  # the other way round
        self._calls: dict[Place, Call] = {}
        self._of_torch: dict[Place, Any] = {}  # by place, what operators of torch are given
        for number, value in self.values.items():
            if isinstance(value, torch.Tensor):
                self._tensors[number] = value
                continue
            self._inputs[number] = place = Place(len(self._inputs))
            self._numbers[place] = number
            if number[0] in fused:
                self._marks[number] = _Mark(math.ldexp(1.0, -900 - len(self._marks)))
                self._marks[number].stand_in = TracedNumber(self, place, value)
            else:
                # A group's may become a float, as a learning rate that was 1.
                dtype = torch.int64 if type(value) is int and isinstance(number[0], str) else torch.float64
                self._tensors[number] = torch.zeros((), dtype=dtype, device="cpu")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the trace is given."""
        return [tensor.detach() for tensor in self._tensors.values()]

    @property
    def inputs(self) -> list[GraphInput]:
        """What these carry."""
        return list(map(_input, self._tensors))

    @contextmanager
    def traced(self, tensors: Iterator[Any]) -> Iterator[Mapping[Number, Any]]:
        """Yields what the numbers are in the block, which runs in the trace; ``tensors`` are the trace's own."""
        self._calls.clear()
        self._of_torch.clear()

        def value_of(_: Any, symbol: sympy.Symbol) -> Any:
            number = self._symbols.get(symbol)
            return None if number is None else float(self.values[number])

        # A kernel may do another thing altogether with a zero, as with SGD's momentum; learning rates begin at it.
        given: dict[Number, Any] = {
            number: 0.0 if number[1] != "lr" and mark == 0 else mark for number, mark in self._marks.items()
        }
        with decided_by_values(value_of, self._note), floats_stay_open(), functions_traced(for_stand_ins=True):
            for number in self._tensors:
                tensor = next(tensors)
                given[number] = tensor
                if not isinstance(self.values[number], torch.Tensor):
                    place = self._inputs[number]
                    self._of_torch[place] = symbol = tensor.item()
                    self._symbols[symbol.node.expr] = number
                    given[number] = TracedNumber(self, place, self.values[number])
            yield given

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Computes with stand-ins as Python does, and notes it; where the result is a bool, that is decided."""
        if any(isinstance(each, py_sym_types) for each in args):  # as a number that a tensor of state holds
            return function(*map(_of_torch, args))
        if not all(type(each) is TracedNumber or isinstance(each, (int, float)) for each in args):
            # With None, or a string, numbers are compared alone.
            is_compared = function in _COMPARED and not any(isinstance(each, torch.Tensor) for each in args)
            return self.built_in(function, function(*map(_value, args)), *args) if is_compared else NotImplemented
        result = as_python(function(*map(_value, args)))
        if type(result) not in (int, float):
            return result if result is NotImplemented else self.built_in(function, result, *args)
        return TracedNumber(self, self._note_call(function, args), result)

    def built_in(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Returns a result as it is: a decision."""
        self._note_call(function, args, result)
        return result

    def _note_call(self, function: Callable[..., Any], args: tuple[Any, ...], *answer: Any) -> Place:
        place = Place(len(self._inputs) + len(self._calls))
        places = tuple(each.place if type(each) is TracedNumber else each for each in args)
        behind = (self._calls[each].numbers for each in places if each in self._calls)
        numbers = frozenset(self._numbers[each] for each in places if each in self._numbers).union(*behind)
        self._calls[place] = Call(function, places, numbers, *answer)
        return place

    def traced_at(self, value: Any) -> Any:
        """Returns what operators of torch are given for what stands at a place: a number that is traced."""
        if not isinstance(value, Place):
            return value
        if value not in self._of_torch:
            call = self._calls[value]
            self._of_torch[value] = call.function(*map(self.traced_at, call.args))
        return self._of_torch[value]

    def _note(self, condition: sympy.Basic) -> None:
        if not self._symbols.keys() >= condition.free_symbols:
            return  # nothing decided: torch assumes that roots of state are real, as Python's pow sees for itself
        symbols = [*condition.free_symbols]
        numbers = [self._symbols[symbol] for symbol in symbols]
        is_true, before = as_function(condition), [repr(self.values[number]) for number in numbers]

        def holds(*now: Any) -> bool:
            return [*map(repr, now)] == before or is_true(dict(zip(symbols, map(float, now), strict=True)))

        self._note_call(holds, tuple(TracedNumber(self, self._inputs[each], None) for each in numbers), True)

    def arithmetic(self, left: Mapping[Number, Any]) -> Arithmetic:
        """Returns what was decided while the step was traced, and how it computes what it leaves."""
        places = {number: each.place if type(each) is TracedNumber else each for number, each in left.items()}
        return Arithmetic(self._inputs, self._calls, places).needed()

    def read(self, graph: fx.Graph, inputs: list[GraphInput]) -> None:
        """Makes each number an input of the traced graph; ``inputs`` are what its placeholders carry."""
        nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
        for number in self._tensors:
            if not isinstance(self.values[number], torch.Tensor):
                placeholder = nodes[_input(number)]
                for item in [*placeholder.users]:
                    placeholder.meta["val"] = item.meta["val"]
                    item.replace_all_uses_with(placeholder)
                    graph.erase_node(item)
        for number, mark in self._marks.items():
            value = float(mark)
            calls = [node for node in graph.nodes if value in node.kwargs.values()]
            if calls:
                with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                    made = graph.placeholder(f"number_{len(inputs)}")
                made.meta["val"] = value
                inputs.append(_input(number))
                for node in calls:
                    node.kwargs = {
                        name: made if type(each) is float and each == value else each
                        for name, each in node.kwargs.items()
                    }


_COMPARED = operator.eq, operator.ne


def _value(value: Any) -> Any:
    return value.value if type(value) is TracedNumber else value


def _computing(function: Callable[..., Any]) -> tuple[Any, Any]:
    def run(one: TracedNumber, *others: Any) -> Any:
        return one.trace.computed(function, one, *others)

    def reflected(one: TracedNumber, other: Any) -> Any:
        return one.trace.computed(function, other, one)

    return run, reflected


def _built_in(function: Callable[..., Any]) -> Any:
    return lambda one, *args: one.trace.built_in(function, function(one.value, *args), one, *args)


class TracedNumber(StandIn):
    """Stands for a number in Python code that is traced."""

    __slots__ = ("place", "trace", "value")

    def __init__(self, trace: TracedNumbers, place: Place, value: Any) -> None:
        self.trace, self.place, self.value = trace, place, value

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns a stand-in for what a function of Python gives."""
        return self.trace.computed(function, *args)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_of_torch, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    __add__, __radd__ = _computing(operator.add)
    __sub__, __rsub__ = _computing(operator.sub)
    __mul__, __rmul__ = _computing(operator.mul)
    __truediv__, __rtruediv__ = _computing(operator.truediv)
    __floordiv__, __rfloordiv__ = _computing(operator.floordiv)
    __mod__, __rmod__ = _computing(operator.mod)
    __pow__, __rpow__ = _computing(operator.pow)
    __neg__, __pos__, __abs__ = (_computing(each)[0] for each in (operator.neg, operator.pos, abs))
    __floor__, __ceil__, __round__ = (_computing(each)[0] for each in (math.floor, math.ceil, round))
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = (
        _computing(each)[0] for each in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    )
    __bool__ = _built_in(bool)
    __float__, __int__, __trunc__ = _built_in(float), _built_in(int), _built_in(math.trunc)
    __index__, __hash__ = _built_in(operator.index), _built_in(hash)
    __str__, __repr__, __format__ = _built_in(str), _built_in(repr), _built_in(format)


def _of_torch(value: Any) -> Any:
    return value.trace.traced_at(value.place) if type(value) is TracedNumber else value


def _compares(operation: Callable[[Any, Any], bool]) -> Any:
    return lambda mark, other: operation(mark.stand_in, other)


class _Mark(float):
    """A number by which another is found again in a trace; who compares it compares the other."""

    stand_in: TracedNumber

    __eq__, __ne__ = _compares(operator.eq), _compares(operator.ne)
    __lt__, __le__ = _compares(operator.lt), _compares(operator.le)
    __gt__, __ge__ = _compares(operator.gt), _compares(operator.ge)
    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return bool(self.stand_in != 0.0)


def _input(number: Number) -> GraphInput:
    owner, name = number
    if isinstance(owner, str):
        return GraphInput(InputKind.OPTIMIZER_STATE, owner, state=name)
    return GraphInput(InputKind.HYPERPARAMETER, f"group {owner}", state=name)
