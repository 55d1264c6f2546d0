"""Evaluate a graph that Dynamo traced: torch-level calls, whose gradients autograd computes later.

Autograd runs the calls of a graph backwards and adds what several calls give to one value, the last call's first. So
two graphs whose outputs are made by the same calls on the same have the same gradients where every value that has one
is read by the same calls, in one order.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.schemas import SET_GRAD_ENABLED
from graphpasses.analysis.dependencies import grad_modes
from graphpasses.analysis.effects import has_gradient, reached_outputs, torch_call_effects
from graphpasses.graph import WAIT, DynamoGraph, argument, is_collective
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.values import Result, Value
from graphpasses.proof.evaluate import Evaluation
from graphpasses.proof.lookups import AXIOM as FUSED
from graphpasses.proof.lookups import Lookups
from graphpasses.proof.rows import RowValues

aten = torch.ops.aten


def other_input(before: DynamoGraph, after: DynamoGraph) -> str:
    """Returns an input that is another tensor than before, or nothing: lookups are known by their tables' places."""
    known = dict(zip((node.name for node in before.placeholders), before.live, strict=True))
    names = zip((node.name for node in after.placeholders), after.live, strict=True)
    return next((name for name, given in names if name in known and known[name] is not given), "")


class TorchCalls(Evaluation):
    """Evaluates a graph that Dynamo traced; its ``uses`` say in which order gradients are added."""

    def __init__(self, graph: DynamoGraph, values: RowValues, facts: Facts, **given: Any) -> None:
        super().__init__(graph, values, facts, **given)
        self._modes = grad_modes(graph.graph)
        self._reached = reached_outputs(graph.graph)
        self._context = values.source(("context",))
        self._lookups = Lookups(graph)
        self._done.unknown = next((str(node.target) for node in self._lookups.unknown), "")

    def evaluate_node(self, node: fx.Node) -> Result:
        """Returns the value of a node, after those before it, and notes which values with a gradient it reads."""
        is_use = node in self._reached and not _is_part(self._of, node)
        read = filter(has_gradient, node.all_input_nodes) if is_use else ()
        used = {number for each in read for number in _numbers(self._read(each))}
        value = self._value(node)
        results = tuple(dict.fromkeys(_numbers(value)))
        for number in used - {*results}:
            self._done.uses.setdefault(number, []).append(results)
        return value

    def opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        """Returns a value into which no rule looks; each empty tensor is one, made for the gradient that it gets."""
        if isinstance(fake, torch.Tensor) and any(type(size) is int and not size for size in fake.shape):
            return self._table.other(("result", key, part, fake.dtype, tuple(map(str, fake.shape))), fake.dtype)
        return super().opaque(node, fake, key, part)

    def _value(self, node: fx.Node) -> Result:
        is_call = node.op in ("call_function", "call_method") and not _is_part(self._of, node)
        if not is_call or is_collective(node) or node.target == WAIT:
            return super().evaluate_node(node)
        if node.target is SET_GRAD_ENABLED:
            return None  # what follows says in which mode it runs
        mode = (self._modes[node], self._context)
        if node.target == aten.clone.default and not node.kwargs:
            return self._read(argument(node))
        if node in self._lookups:  # it writes its tables in backward
            return self.opaque(node, self._facts[node], (*self._lookups.key(node, self._argument), *mode))
        parts = self._lookups.parts(node, self._argument)
        if parts is not None:
            self._axioms.add(FUSED)
            fakes = self._facts[node]
            return [self.opaque(node, fake, (*key, *mode)) for key, fake in zip(parts, fakes, strict=True)]
        effects = torch_call_effects(node)
        written = [each.name for each in effects.writes]
        overlaps = self._overlaps(node, written) if written else ()
        key: Hashable = (
            *self._call(node.target, node.args, node.kwargs),
            *mode,
            *(("overlapping", overlaps) if overlaps else ()),
        )
        if effects.changes_context:
            self._context = self._table.source(("context after", key))
        if effects.has_hidden_state:
            key = ("drawn", key, self._random)
            self._random = self._table.source(("random state after", key))
        result = self.opaque(node, self._facts[node], key)
        return self._written(node, effects.writes, key, result) if effects.writes else result


def _is_part(values: Any, node: fx.Node) -> bool:
    """Whether a node takes one of several values that a call returned."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(values[source], list) and isinstance(index, int)


def _numbers(value: Result) -> Iterator[int]:
    for each in pytree.tree_leaves(value):
        if isinstance(each, Value):
            yield each.number
