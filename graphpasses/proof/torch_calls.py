"""Evaluate a graph that Dynamo traced: torch-level calls, whose gradients autograd computes later.

Autograd runs the calls of a graph backwards and adds what several calls give to one value, the last call's first. So
two graphs whose outputs are made by the same calls on the same have the same gradients where every value that has one
is read by the same calls, in one order; what two calls compute alike are two values. Lookups in tables are known by
what they look up; one that joins several counts as each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.schemas import SET_GRAD_ENABLED
from graphpasses.analysis.dependencies import grad_modes
from graphpasses.analysis.effects import has_gradient, reached_outputs, torch_call_effects
from graphpasses.fbgemm.names import FBGEMM, UPDATING_LOOKUP
from graphpasses.graph import WAIT, DynamoGraph, argument, is_collective
from graphpasses.graph.nodes import reach
from graphpasses.proof.core.facts import Facts, Leaf
from graphpasses.proof.core.values import Result, Value
from graphpasses.proof.core.views import View
from graphpasses.proof.evaluate import Evaluation
from graphpasses.proof.evaluated import Touch, Use, Variable
from graphpasses.proof.fused_lookups import FUSED, Lookups
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
        self._lookups = Lookups(graph, self._reached, facts)
        self._done.unknown = next((str(node.target) for node in self._lookups.unknown), "")
        self._live = dict(zip(graph.placeholders, graph.live, strict=True))
        # By lookup, in which mode it runs, and what the results of each that it joins depend on.
        self._parts: dict[fx.Node, tuple[Hashable, list[tuple[Hashable, ...]]]] = {}
        self._updates: dict[int, int] = {}  # by where a table lies, the last lookup that updates it
        self._was_given: dict[fx.Node, list[Result]] = {}  # by node, what it was given when it was evaluated
        self._uses = Uses(self._is_part)
        writes = {node: written for node in graph.graph.nodes if (written := _writes(node))}
        self._written_of = reach(writes, lambda node: node.all_input_nodes)
        # By memory that is written the calls that read or return what lies there; and which of it gets a gradient.
        self._touched = {root: list[Touch]() for each in chain(*writes.values()) for root in self._memories(each)}
        self._with_gradient = set[Leaf]()

    def evaluate_node(self, node: fx.Node) -> Result:
        """Returns the value of a node, after those before it, and notes which values with a gradient it reads."""
        is_use = (node in self._reached or node in self._written_of) and not self._is_part(node)
        read = filter(has_gradient, node.all_input_nodes) if is_use else ()
        used = dict.fromkeys(self._uses.value(each, number) for each in read for number in _numbers(self._read(each)))
        self._was_given[node] = given = [self._read(each) for each in node.all_input_nodes]
        value = self._value(node)
        numbers = [*_numbers(value)]
        if self._touched and not self._is_part(node):
            self._note_touch(node, value, [number for each in given for number in _numbers(each)])
        for each, held in zip(node.all_input_nodes, given, strict=True):
            if (now := self._read(each)) != held:
                self._uses.note_write(each, node)
                numbers += _numbers(now)
        if is_use:
            self._uses.note(node, used, numbers)
        return value

    def _note_touch(self, node: fx.Node, value: Result, given: list[int]) -> None:
        """Notes a call with the memory of what it reads and returns, where that is written."""
        mode = bool(self._modes[node])
        read = {root for each in node.all_input_nodes for root in self._memories(each)}
        for root in self._touched.keys() & read:
            self._touched[root].append(Touch((str(node.target), mode), (*given, *_numbers(value))))
        for root in self._touched.keys() & self._memories(node) - read:  # it is made: its value says how
            of = value if root[1] is None else value[root[1]]
            self._touched[root].append(Touch(("", mode), tuple(_numbers(of))))
        with_gradient = [each for each in (node, *node.all_input_nodes) if has_gradient(each)]
        self._with_gradient.update(*map(self._memories, with_gradient))

    def evaluate_outputs(self) -> None:
        super().evaluate_outputs()
        # Autograd follows writes through views by when, and in which mode, these were made.
        self._done.touched = Counter(
            tuple(self._touched[each]) for each in self._touched.keys() & self._with_gradient
        )
        outputs = self._graph.output_values
        for name, node in ((f"output {place}", each) for place, each in enumerate(outputs) if each in self._reached):
            self._uses.note_output(name, [self._uses.value(node, each) for each in _numbers(self._read(node))])
        self._done.uses = self._uses.by_value()
        mode = self._modes[self._graph.graph.output_node()]
        self._done.context = self._table.source(("context left", mode, self._context))

    def opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        """Returns a value into which no rule looks; each empty tensor is one, made for the gradient that it gets."""
        if isinstance(fake, torch.Tensor) and any(type(size) is int and not size for size in fake.shape):
            return self._table.other(("result", key, part, fake.dtype, tuple(map(str, fake.shape))), fake.dtype)
        return super().opaque(node, fake, key, part)

    def _value(self, node: fx.Node) -> Result:
        is_call = node.op in ("call_function", "call_method") and not self._is_part(node)
        if not is_call or is_collective(node) or node.target == WAIT:
            return super().evaluate_node(node)
        if node.target is SET_GRAD_ENABLED:
            return None  # what follows says in which mode it runs
        mode = (self._modes[node], self._context)
        key: Any
        is_copy = node.target == aten.clone.default and not node.kwargs
        if is_copy and (self._modes[node] or not has_gradient(argument(node))):
            return self._read(argument(node))
        if node in self._lookups:  # it writes its tables in backward
            context = (self._written_into(node), *mode)
            is_followed = all(map(self._is_as_made, self._lookups.joining(node)))
            parts = self._lookups.parts(node, self._argument) if is_followed else []
            looked_up = parts or [self._lookups.whole(node, self._argument)]
            keys = [self._in_turn((*each.key, *context), each.tables) for each in looked_up]
            self._parts[node] = mode, keys
            return self.opaque(node, self._facts[node], ("call", str(node.target), *keys) if parts else keys[0])
        if self._lookups.is_split(node) and self._is_as_made(argument(node)):
            its_mode, keys = self._parts[argument(node)]
            if mode == its_mode and len(keys) == len(self._facts[node]):
                self._axioms.add(FUSED)
                return [self.opaque(node, fake, part) for part, fake in zip(keys, self._facts[node], strict=True)]
        effects = torch_call_effects(node)
        written = [each.name for each in effects.writes]
        overlaps = self._overlaps(node, written) if written else ()
        key = (
            *self._call(node.target, node.args, node.kwargs),
            *mode,
            *(("overlapping", overlaps) if overlaps else ()),
        )
        if effects.changes_context:
            self._context = self._table.source(("context after", key))
        key = self._after_others(effects.has_hidden_state, False, key)
        if UPDATING_LOOKUP.fullmatch(str(node.target)) and node in self._reached:
            live = (self._live.get(each) for each in node.all_input_nodes)
            key = self._in_turn(
                key, [each.data_ptr() for each in live if isinstance(each, nn.Parameter) and len(each)]
            )
        result = self.opaque(node, self._facts[node], key)
        return self._written(node, effects.writes, key, result) if effects.writes else result

    def moved_value(self, node: fx.Node, target: Any) -> Result:
        """Returns what a rule says of a call; of one that writes none does: gradients go through the write."""
        return super().moved_value(node, target) if target == node.target else None

    def _is_as_made(self, node: fx.Node) -> bool:
        """Whether neither a node's value nor what it was given has been written since it was evaluated."""
        given = [self._read(each) for each in node.all_input_nodes]
        return given == self._was_given[node] and self._read(node) == self._of[node]

    def _in_turn(self, key: tuple[Hashable, ...], tables: Collection[int]) -> tuple[Hashable, ...]:
        """Returns what a lookup counts as that updates tables, behind those that update them, too.

        Autograd runs the last one first; each gets its own gradient, also where two look up the same.
        """
        key = (*key, frozenset((table, self._updates.get(table)) for table in tables))
        self._updates.update(dict.fromkeys(tables, self._table.source(("updated", key))))
        return key

    def _written_into(self, node: fx.Node) -> Hashable:
        """Returns what the graph has written into the memory of a lookup's tables and settings, by inputs' names."""
        memories = {self._memory(each) for each in self._lookups.read_beside_bags(node) if each in self._live}
        written = ((root, held.value.number) for (root, _), held in self._held.items() if root in self._live)
        return frozenset((self._inputs[root], number) for root, number in written if self._memory(root) in memories)

    def _memory(self, node: fx.Node) -> int | None:
        """Returns where the memory of an input begins; None of what has no strides."""
        live = self._live[node]
        return live.untyped_storage().data_ptr() if View.of(live) is not None else None


def _numbers(value: Result) -> Iterator[int]:
    for each in pytree.tree_leaves(value):
        if isinstance(each, Value):
            yield each.number


def _writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns what a call writes, but for FBGEMM's, which correct ids, and update tables in backward."""
    return () if str(node.target).startswith(FBGEMM) else torch_call_effects(node).writes


# ---- in which order gradients are added ----------------------------------------------------------------------------

_Made = tuple[int, fx.Node]  # a number, and the call that has made or written it


class _Copy(NamedTuple):
    made: _Made


class Uses:
    """Notes which calls read the values that get gradients; ``is_part`` says what takes one of a call's results."""

    def __init__(self, is_part: Callable[[fx.Node], bool]) -> None:
        self._is_part = is_part
        self._writers: dict[fx.Node, fx.Node] = {}  # by node, the last call that wrote what it was given of it
        self._makers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._uses: defaultdict[_Made, list[Use | _Copy]] = defaultdict(list)
        self._copies: set[_Made] = set()

    def value(self, node: fx.Node, number: int) -> _Made:
        """Returns the value that is read of a node, by its number."""
        while node not in self._writers and self._is_part(node):
            node = argument(node)
        made = number, self._writers.get(node, node)
        self._variable(made)
        return made

    def note_write(self, node: fx.Node, by: fx.Node) -> None:
        """Notes that a call has written what it was given of a node."""
        self._writers[node] = by

    def note(self, node: fx.Node, used: Iterable[_Made], numbers: Iterable[int]) -> None:
        """Notes that a call reads values, and returns those of some numbers; what it returns as it was is a copy."""
        used, numbers = list(used), list(dict.fromkeys(numbers))
        copied = {number for number, _ in used}.intersection(numbers)
        self._copies |= {(number, node) for number in copied}
        results = tuple(self._variable((number, node)) for number in numbers if number not in copied)
        for each in used:
            self._uses[each].append(_Copy((each[0], node)) if each[0] in copied else results)

    def note_output(self, name: str, values: Iterable[_Made]) -> None:
        """Notes that an output has values, whose gradients come first."""
        for each in values:
            self._uses[each].append(name)

    def by_value(self) -> dict[Variable, list[Use]]:
        """Returns what each value is read by, in order."""
        return {self._variable(each): self._added(each) for each in list(self._uses) if each not in self._copies}

    def _variable(self, made: _Made) -> Variable:
        number, node = made
        makers = self._makers[number]
        if made not in self._copies and node not in makers:
            makers.append(node)
        return Variable(number, makers.index(node) if node in makers else -1)

    def _added(self, made: _Made) -> list[Use]:
        """Returns what is added to a value's gradient; what a copy gets is summed first."""
        uses, found = self._uses[made], list[Use]()
        for each in uses:
            if not isinstance(each, _Copy):
                found.append(each)
                continue
            added = self._added(each.made)
            is_same_sum = len(added) == 1 or len(uses) == 1
            found += added if is_same_sum else [tuple(added)] if added else []
        return found
