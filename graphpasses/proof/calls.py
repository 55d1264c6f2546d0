"""What the calls of operators make: of rules where there are some, and what they write."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from graphpasses._torch import pytree
from graphpasses._torch.schemas import (
    FunctionalizedCall,
    bind_named,
    given_arguments,
    is_operator,
    is_seeded,
    schemas,
)
from graphpasses.analysis.effects import names_written
from graphpasses.fbgemm.names import BOUNDS_CHECK, TRACED_LOOKUP
from graphpasses.graph import TrainGraph, argument
from graphpasses.proof import elements, movement
from graphpasses.proof.core.axioms import RULES
from graphpasses.proof.core.evaluated import Argument, Result
from graphpasses.proof.core.facts import Facts, Place, leaves
from graphpasses.proof.core.memory import Memory, evaluated
from graphpasses.proof.core.operators import UNLIKE_IN_PLACE, Call
from graphpasses.proof.core.values import Value, Values
from graphpasses.proof.spelling import plain_call


class Calls(Memory):
    """Evaluates calls of operators that do not communicate."""

    def __init__(self, graph: TrainGraph, values: Values, facts: Facts) -> None:
        super().__init__(graph, values, facts)
        self._random = values.source(("random state",))
        self._hidden = values.source(("hidden state",))
        self._inputs: dict[fx.Node, str] = {}
        self._counts: dict[int, int] = {}  # by the number of a count of bad ids, where it began

    def _plain(self, target: Any, args: Any, kwargs: Any) -> Call:
        first = args[0] if args and isinstance(args[0], fx.Node) else None
        seen = None if first is None else self._facts.geometries.get(first)
        return plain_call(target, args, kwargs, seen[0] if seen and first is not None else None)

    def _arguments(self, node: fx.Node) -> Call:
        """Returns the arguments of a node as all that mean the same have them."""
        return self._plain(node.target, node.args, node.kwargs)

    def _as_read(self, target: Any, args: list[Any]) -> list[Any]:
        """Returns the arguments of a call as far as it reads them: no bounds check reads the count of bad ids."""
        if str(target) == BOUNDS_CHECK:
            place = _warning_of(target)
            args[place] = Argument(self._counts.get(args[place].number, args[place].number), None)
        return args

    def _after_others(self, is_drawn: bool, has_hidden_state: bool, key: Hashable) -> Hashable:
        """Returns what a call depends on that may draw random numbers, or have a state of its own."""
        if is_drawn:
            key = ("drawn", key, self._random)
            self._random = self._table.source(("random state after", key))
        elif has_hidden_state:
            key = ("hidden", key, self._hidden)
            self._hidden = self._table.source(("hidden state after", key))
        return key

    def _moved(self, node: fx.Node, fake: Any, target: Any) -> Result:
        """Returns what a rule says of an operator, or of the one that does the same out of place."""
        if target not in RULES:
            return None
        name, rule = RULES[target]
        if target in movement.IDENTITIES and isinstance(x := self._read(argument(node)), Value):
            self._done.axioms.add(name)
            return x
        if (seen := self._facts.geometries[node]) is None or None in seen:  # sizes or strides depend on data
            return None
        args, kwargs = self._plain(target, node.args, node.kwargs)
        args, kwargs = evaluated(args, self._read), evaluated(kwargs, self._read)
        if target == torch.ops.aten.constant_pad_nd.default:
            kwargs["origin"] = origin_of_padding(node, self._inputs)
        if any(
            isinstance(each, Value) and each.pieces is None for each in pytree.tree_leaves((args, kwargs))
        ):
            return None
        found = rule(self._table, fake, *args, **kwargs)
        if found is not None:
            self._done.axioms.add(name)
        return found

    def _written(self, node: fx.Node, writes: tuple[fx.Node, ...], key: Hashable, result: Result) -> Result:
        """Evaluates an operator that writes arguments."""
        given = self._arguments(node)[0]
        first = next(iter(given), None)
        fake = self._facts[node]
        is_first = len(writes) == 1 and writes[0] is first
        if is_first and self._roots(node) == self._roots(first) and isinstance(result, Value):  # type: ignore[arg-type]
            if "overlapping" not in _parts_of(key):
                if node.target == torch.ops.aten.copy_.default:
                    result = result if (copied := self._copied(node)) is None else copied
                elif (moved := self._moved(node, fake, _out_of_place(node.target))) is not None:
                    result = moved
            self._write(first, result, node)  # type: ignore[arg-type]
            return result
        for index, each in enumerate(writes):
            written = self.opaque(each, self._facts[each], ("written", index, key))
            if str(node.target) == BOUNDS_CHECK and each is given[_warning_of(node.target)]:
                self._note_count(self._read(each), written)
            self._write(each, written, node)
        return result

    def _copied(self, node: fx.Node) -> Value | None:
        to, of, *_ = self._arguments(node)[0]
        target, given, source = self._facts[to], self._facts[of], self._read(of)
        if not isinstance(source, Value):
            return None
        if source.pieces is None:  # its sizes depend on data
            alike = source.dtype == target.dtype and statically_known_true(sym_eq(given.shape, target.shape))
            return source if alike else None
        if source.shape != tuple(target.shape):
            return None
        self._done.axioms.add("casts")
        return elements.cast(self._table, source, target.dtype)

    def _each(self, node: fx.Node, fakes: Any) -> list[Any]:
        """Evaluates an operator on lists of tensors: on each element as if that were alone."""
        self._done.axioms.add("lists")
        results: list[Any] = []
        written = names_written(node)
        args, kwargs = evaluated(self._arguments(node), lambda each: self._argument(each, node.target))
        targets = {
            argument.name: [leaf for each in pytree.tree_leaves(value) for leaf in self._leaves(each)]
            for argument, value in given_arguments(node)
            if argument.name in written
        }
        length = max(len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
        for index in range(length):

            def element(value: Any, index: int = index) -> Any:
                return value[index] if isinstance(value, (list, tuple)) and value else value

            key = self._call_of(
                node.target, [*map(element, args)], {name: element(value) for name, value in kwargs.items()}
            )
            if isinstance(fakes, (list, tuple)):
                results.append(self.opaque(node, fakes[index], key))
            for name, leaves_written in targets.items():
                if index < len(leaves_written):
                    of, fake, place = leaves_written[index]
                    value = self.opaque(of, fake, ("written", name, key))
                    self._write_tensor(place, value, (node, (name, index)))
        return results

    def _leaves(self, node: Any) -> list[tuple[fx.Node, Any, Place]]:
        """Returns the tensors of a node that have memory, with their fake values."""
        if not isinstance(node, fx.Node):
            return []
        found = zip(leaves(self._facts[node]), self._facts.places[node], strict=True)
        return [(node, fake, place) for (fake, _), place in found if place is not None]

    def _functionalized(self, node: fx.Node, call: FunctionalizedCall) -> list[Any]:
        """Evaluates a call that writes copies as the one that writes in place; it returns the copies, too."""
        written = [view.base for view in views(call)]
        values = {name: _written_bases(view, call.bases) for name, view in call.writes.items()}
        args, kwargs = bind_named(call.op, {**call.reads, **values})
        key = self._after_others(
            is_seeded(call.op), not is_function(call.op), self._call(call.op, args, kwargs)
        )
        fakes = list(self._facts[node])
        results = [
            self.opaque(node, fake, key, index if call.num_results > 1 else None)
            for index, fake in enumerate(fakes[: call.num_results])
        ]
        for index, fake in enumerate(fakes[call.num_results :]):
            number = max(place for place, base in enumerate(written) if base == index)
            results.append(self.opaque(node, fake, ("written", number, key)))
        if str(call.op) == BOUNDS_CHECK:
            count = args[_warning_of(call.op)]
            self._note_count(self._read(count), results[call.num_results + call.bases.index(count)])
        return results

    def _note_count(self, old: Result, new: Result) -> None:
        """Notes what a bounds check writes over a count of bad ids: to further checks it is where that began."""
        if isinstance(old, Value) and isinstance(new, Value):
            self._counts[new.number] = self._counts.get(old.number, old.number)


def origin_of_padding(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str | None:
    """Returns the input of which a padded tensor is a part: other ranks' parts may be larger."""
    while node not in inputs:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.target not in RULES:
            return None
        node = node.all_input_nodes[0]
    return inputs[node]


@functools.cache
def _out_of_place(target: Any) -> Any:
    """Returns what makes a tensor of the elements that an operator writes in place, each alone; None for others."""
    name = str(target).removeprefix("aten.")
    packet, _, overload = name.rpartition(".")
    is_pointwise = is_operator(target) and torch.Tag.pointwise in target.tags
    if not is_pointwise or not packet.endswith("_") or target in UNLIKE_IN_PLACE:
        return None
    return getattr(getattr(torch.ops.aten, packet[:-1], None), overload, None)


def _warning_of(check: Any) -> int:
    """Returns which argument of a bounds check is the count of bad ids, which it overwrites or leaves."""
    (schema,) = schemas(check)
    return [argument.name for argument in schema.arguments].index("warning")


def is_function(target: Any) -> bool:
    """Whether the results of an operator of FBGEMM that may have a state follow from its arguments."""
    return str(target) == BOUNDS_CHECK or TRACED_LOOKUP.fullmatch(str(target)) is not None


def _parts_of(key: Any) -> Any:
    """Returns the parts of a call's key, without what came before it."""
    while key[0] in ("drawn", "hidden"):
        key = key[1]
    return key


def views(call: FunctionalizedCall) -> list[Any]:
    """Returns which bases a call writes, argument by argument."""
    found: list[Any] = []
    for view in call.writes.values():
        found += view if isinstance(view, list) else [view] * (view is not None)
    return found


def _written_bases(view: Any, bases: Sequence[fx.Node]) -> Any:
    """Returns the bases in place of what says which of them an argument is."""
    if isinstance(view, list):
        return [_written_bases(each, bases) for each in view]
    return None if view is None else bases[view.base]
