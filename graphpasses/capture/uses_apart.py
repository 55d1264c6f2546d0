"""Gradients of the uses of a compiled graph's inputs, which autograd adds to those of other uses, one by one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses._torch.aot_autograd import boxed
from graphpasses._torch.aot_values import adds_gradients, described_outputs
from graphpasses.capture.late_updates import Compile, Compiled, compile_whole
from graphpasses.graph import DynamoGraph, InputKind
from graphpasses.graph.nodes import storages
from graphpasses.ops.autograd_functions import use_apart


class UsesApart:
    """The inputs of a compiled graph of which backward returns the gradient of each use, too.

    The graph adds the gradients of all uses in it, and eager adds each to what other graphs' uses, and those that
    are not compiled, have given. Not of inputs of which a view comes out of the graph, nor of ``reduced`` parameters.
    """

    def __init__(self, graph: DynamoGraph, *, reduced: bool) -> None:
        values = [each for each in graph.graph.output_node().args[0] if isinstance(each, fx.Node)]  # type: ignore[union-attr]
        returned = Counter(memory for each in values for memory in storages(each))
        # AOTAutograd makes views of its inputs that a graph returns outside of the joint graph.
        self._num_views = [sum(returned[memory] for memory in storages(node)) for node in graph.placeholders]
        kinds = {InputKind.VALUE} if reduced else {InputKind.VALUE, InputKind.PARAMETER}
        self._open = {
            index for index, item in enumerate(graph.inputs) if item.kind in kinds and not self._num_views[index]
        }
        self.num_uses: dict[int, int] = {}
        self._places: dict[int, slice] = {}  # of each input's gradients, in what the backward graph returns
        self._num_outputs: int | None = None  # of the backward graph, once there is one
        self._returned = threading.local()

    def read(self, joint: fx.Graph) -> list[int]:
        """Returns how many gradients eager adds for each input, which a joint graph adds, by position."""
        counts = [*self._num_views]
        for value, index, written, attr, _ in described_outputs(joint):
            if written is not None:
                self._open.discard(written)
            if index is not None and isinstance(value, fx.Node):
                counts[index] = max(counts[index], self._num_views[index] + len(_summands(value)))
                if not attr and index in self._open and counts[index] > 1:
                    self.num_uses[index] = counts[index]
        for index in self.num_uses.keys() - self._open:
            del self.num_uses[index]
        return counts

    def return_apart(self, backward: fx.Graph) -> None:
        """Lets a backward graph return the gradients of uses after its outputs, the first in place of their sum."""
        output = backward.output_node()
        outputs = described_outputs(backward)
        values = [each.value for each in outputs]
        self._num_outputs = len(values)
        sums: list[fx.Node] = []
        for place, (value, index, *_) in enumerate(outputs):
            if index in self.num_uses and isinstance(value, fx.Node):
                summands = _summands(value)
                if len(summands) == self.num_uses[index]:
                    self._places[index] = slice(len(values), len(values) + len(summands))
                    values += summands
                    values[place] = summands[0]
                    sums.append(value)
        output.args = (values,)
        for value in dict.fromkeys(sums):
            while adds_gradients(value) and not value.users:
                value, unused = value.all_input_nodes[0], value
                backward.erase_node(unused)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> Compiled:
        """Compiles a backward graph; of what it returns these gradients are left for the call's hook to take."""
        compiled = compile_whole(module, inputs, compile_graph)

        def run(values: list[Any]) -> Any:
            results = compiled(values)
            if not self._places:
                return results
            self._returned.results = results
            return results[: self._num_outputs]

        return boxed(run)

    def use(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, list[Tensor | None]]]:
        """Returns what a call takes for its inputs, and where :meth:`take` puts the gradients of uses."""
        taken: dict[int, list[Tensor | None]] = {}
        values = list(inputs)
        for index, num_uses in self.num_uses.items():
            if self._num_outputs is not None and index not in self._places:
                continue  # a pass made of the sum another
            if values[index].requires_grad and torch.is_grad_enabled():
                taken[index] = []
                values[index] = use_apart(values[index], num_uses, taken[index])
        return values, taken

    def take(self, taken: dict[int, list[Tensor | None]]) -> set[int]:
        """Puts the gradients of uses where autograd takes them; returns of which inputs there are any."""
        results = self._returned.__dict__.pop("results", ())
        found = taken.keys() & self._places.keys()
        for index in found:
            taken[index][:] = results[self._places[index]]
        return found


def _summands(value: fx.Node) -> list[fx.Node]:
    """Returns the gradients that are added to one, the first first."""
    found: list[fx.Node] = []
    while adds_gradients(value):
        before, last = value.args
        assert isinstance(before, fx.Node)
        assert isinstance(last, fx.Node)
        found.insert(0, last)
        value = before
    return [value, *found]
