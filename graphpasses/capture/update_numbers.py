"""What an update reads of its optimizer's hyperparameters when it runs, and what the optimizer decides by them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch.conditions import as_function
from graphpasses._torch.symbols import decided_by_values
from graphpasses._torch.traced_floats import floats_stay_open
from graphpasses.graph import GraphInput, InputKind
from graphpasses.state.optimizers import Number, NumberDecision, Optimizers, numbers_of


class TracedNumbers:
    """The numbers of optimizers' groups, and tensors in their places, while its step is traced.

    Steps compute with numbers in Python: there each is a number that a tensor holds, which is traced. A fused kernel
    takes numbers, which a trace keeps as they are: there each is a number by which it is found again. An optimizer
    that compares a number is answered with its value, and the answer is a decision.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.values = numbers_of(optimizers)
        self._symbols: dict[sympy.Symbol, Number] = {}
        self._decided: list[NumberDecision] = []
        self._marks: dict[Number, _Mark] = {}
        self._tensors: dict[Number, torch.Tensor] = {}
        for number, value in self.values.items():
            if isinstance(value, torch.Tensor):
                self._tensors[number] = value
            elif optimizers.groups[number[0]][1].get("fused"):
                self._marks[number] = mark = _Mark(math.ldexp(1.0, -900 - len(self._marks)))
                mark.number, mark.value, mark.decided = number, value, self._decided.append
            else:
                self._tensors[number] = torch.tensor(0.0, dtype=torch.float64, device="cpu")

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
        self._decided.clear()

        def value_of(_: Any, symbol: sympy.Symbol) -> Any:
            number = self._symbols.get(symbol)
            return None if number is None else float(self.values[number])

        # A kernel may do another thing altogether with a zero, as with SGD's momentum; learning rates begin at it.
        given: dict[Number, Any] = {
            number: 0.0 if number[1] != "lr" and mark == 0 else mark for number, mark in self._marks.items()
        }
        with decided_by_values(value_of, self._note), floats_stay_open():
            for number in self._tensors:
                tensor = next(tensors)
                given[number] = tensor
                if not isinstance(self.values[number], torch.Tensor):
                    given[number] = tensor.item()
                    self._symbols[given[number].node.expr] = number
            yield given

    def _note(self, condition: sympy.Basic) -> None:
        if not self._symbols.keys() >= condition.free_symbols:
            return  # nothing decided: torch assumes that roots of state are real, as Python's pow sees for itself
        symbols = {symbol: self._symbols[symbol] for symbol in condition.free_symbols}
        is_true = as_function(condition)
        before = {number: repr(self.values[number]) for number in symbols.values()}

        def holds(now: Mapping[Number, Any]) -> bool:
            return all(repr(now[number]) == text for number, text in before.items()) or is_true(
                {symbol: float(now[number]) for symbol, number in symbols.items()}
            )

        self._decided.append(NumberDecision(tuple(before), holds))

    @property
    def decisions(self) -> tuple[NumberDecision, ...]:
        """What was decided while the step was traced."""
        return tuple(self._decided)

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


def _compares(operation: Callable[[Any, Any], bool]) -> Any:
    return lambda mark, other: mark.compared(operation, other)


class _Mark(float):
    """A number by which another is found again in a trace; who compares it compares the other."""

    number: Number
    value: float
    decided: Callable[[NumberDecision], None]

    def compared(self, operation: Callable[[Any, Any], bool], other: Any) -> bool:
        """Compares the other number, and tells of it."""
        number, answer = self.number, operation(self.value, other)
        self.decided(NumberDecision((number,), lambda now: operation(now[number], other) == answer))
        return answer

    __eq__, __ne__ = _compares(operator.eq), _compares(operator.ne)
    __lt__, __le__ = _compares(operator.lt), _compares(operator.le)
    __gt__, __ge__ = _compares(operator.gt), _compares(operator.ge)
    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return self.compared(operator.ne, 0.0)


def _input(number: Number) -> GraphInput:
    index, name = number
    return GraphInput(InputKind.HYPERPARAMETER, f"group {index}", state=name)
