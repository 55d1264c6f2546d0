"""Evaluate a graph that Dynamo traced: torch-level calls, whose gradients autograd computes later.

Autograd runs the calls of a graph backwards and adds what several calls give to one value, the last call's first. So
two graphs whose outputs are made by the same calls on the same have the same gradients where every value that has one
is read by the same calls, in one order; what two calls compute alike are two values. Lookups in tables are known by
what they look up; one that joins several counts as each of them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.schemas import SET_GRAD_ENABLED
from graphpasses._torch.storage import memories
from graphpasses.analysis.dependencies import grad_modes
from graphpasses.analysis.effects import has_gradient, reached_outputs, torch_call_effects
from graphpasses.fbgemm.lookups import INFO_B, MIXED_D, LookupCall
from graphpasses.fbgemm.names import FBGEMM, UPDATING_LOOKUP, complete_cumsum
from graphpasses.graph import WAIT, DynamoGraph, argument, is_collective
from graphpasses.graph.nodes import freeze
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.operators import AXIOMS
from graphpasses.proof.core.values import Result, Value
from graphpasses.proof.core.views import View
from graphpasses.proof.evaluate import Evaluation
from graphpasses.proof.rows import RowValues
from graphpasses.proof.spelling import evaluated
from graphpasses.proof.uses import Uses

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
        self._written_of = _needed([node for node in graph.graph.nodes if _writes(node)])
        self._touched: dict[Hashable, list[Hashable]] = {}  # by memory, the calls that read or return what lies there
        self._with_gradient, self._rewritten = set[Hashable](), set[Hashable]()  # memory

    def evaluate_node(self, node: fx.Node) -> Result:
        """Returns the value of a node, after those before it, and notes which values with a gradient it reads."""
        is_use = (node in self._reached or node in self._written_of) and not self._is_part(node)
        read = filter(has_gradient, node.all_input_nodes) if is_use else ()
        used = dict.fromkeys(self._uses.value(each, number) for each in read for number in _numbers(self._read(each)))
        self._was_given[node] = given = [self._read(each) for each in node.all_input_nodes]
        value = self._value(node)
        numbers = [*_numbers(value)]
        self._note_touch(node, [number for each in given for number in _numbers(each)], numbers)
        for each, held in zip(node.all_input_nodes, given, strict=True):
            if (now := self._read(each)) != held:
                self._uses.note_write(each, node)
                numbers += _numbers(now)
        if is_use:
            self._uses.note(node, used, numbers)
        return value

    def _note_touch(self, node: fx.Node, given: list[int], numbers: list[int]) -> None:
        """Notes a call with the memory of what it reads and returns."""
        touched = [node, *node.all_input_nodes]
        call = str(node.target), bool(self._modes[node]), tuple(given), tuple(numbers)
        for memory in memories([self._facts[each] for each in touched]):
            self._touched.setdefault(memory, []).append(call)
        with_gradient = [each for each in touched if has_gradient(each)]
        self._with_gradient |= memories([self._facts[each] for each in with_gradient])
        self._rewritten |= memories([self._facts[each] for each in _writes(node)])

    def evaluate_outputs(self) -> None:
        super().evaluate_outputs()
        # Autograd follows writes through views by when, and in which mode, these were made.
        self._done.touched = Counter(tuple(self._touched[each]) for each in self._rewritten & self._with_gradient)
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


# ---- lookups ------------------------------------------------------------------------------------------------------

FUSED = "fused lookups"
AXIOMS[FUSED] = (
    "a lookup of several lookups' bags in their distinct tables, by one optimizer, returns side by side what each of "
    "them returns, and its backward updates each table as theirs does"
)

# Arguments that a key says by tables and bags, and such as a fused lookup has of its first member.
_LEFT_OUT = frozenset(
    {
        "weights",
        "momentum1",
        "D_offsets",
        "total_D",
        "max_D",
        "hash_size_cumsum",
        "total_hash_size_bits",
        "indices",
        "offsets",
        "indice_weights",
        "aux_tensor",
        "aux_int",
        "aux_bool",
        "learning_rate_tensor",
    }
)
_TRIGGER = "placeholder_autograd_tensor"
_CACHE_LOCATIONS = 3  # in aux_tensor


@dataclass(frozen=True)
class _Table:
    """The table of a feature: where it and its optimizer's state lie, and its place among the member's rows."""

    weights: int
    state: int
    dim: int
    first_row: int


@dataclass(frozen=True)
class _Member:
    """One of the lookups that a call joins; or the call, if it joins none."""

    bags: tuple[fx.Node | None, ...]  # its ids, its offsets, and its weights or None
    tables: tuple[_Table, ...]  # of each feature
    num_rows: int

    def memory(self, itemsize: int) -> set[tuple[int, int]]:
        """Returns where each table begins and ends."""
        ends = [*sorted({table.first_row for table in self.tables}), self.num_rows]
        rows = {first: end - first for first, end in pairwise(ends)}
        return {
            (table.weights, table.weights + rows[table.first_row] * table.dim * itemsize) for table in self.tables
        }


def _writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns what a call writes, but for FBGEMM's, which correct ids, and update tables in backward."""
    return () if str(node.target).startswith(FBGEMM) else torch_call_effects(node).writes


def _needed(calls: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns calls, and what these are computed of."""
    needed, pending = set[fx.Node](), [*calls]
    while pending:
        if (node := pending.pop()) not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


class LookedUp(NamedTuple):
    """What a lookup's result depends on."""

    key: tuple[Hashable, ...]
    tables: frozenset[int]  # where those lie that it updates in backward


class Lookups:
    """The lookups of a graph that Dynamo traced; ``unknown`` join bags for a lookup that is not known."""

    def __init__(self, graph: DynamoGraph, reached: Mapping[fx.Node, Hashable], facts: Facts) -> None:
        calls = [call for call in LookupCall.all(graph) if call.reject_reason() is None]
        self._calls = {call.node: call for call in calls if _is_consistent(call)}
        self._reached = reached
        self._facts = facts
        self._members = {node: _members(call) for node, call in self._calls.items()}
        fused = [self._calls[node] for node, members in self._members.items() if members]
        known = {argument(call.arguments["indices"]) for call in fused}
        self.unknown = [node for node in graph.graph.nodes if node.target == JOIN_BAGS and node not in known]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._calls

    def read_beside_bags(self, node: fx.Node) -> list[fx.Node]:
        """Returns a lookup's tables and settings."""
        bags = _bags(self._calls[node])
        return [each for each in node.all_input_nodes if each not in bags]

    def whole(self, node: fx.Node, read: Callable[[fx.Node], Any]) -> LookedUp:
        """Returns what a lookup's result depends on; ``read`` returns the value of an argument."""
        call = self._calls[node]
        return self._looked_up(call, _member(call, _bags(call), slice(None)), read)

    def joining(self, node: fx.Node) -> list[fx.Node]:
        """Returns what makes a lookup's bags of those of several; nothing if it joins none."""
        if not self._members[node]:
            return []
        indices, offsets, *weights = (each for each in _bags(self._calls[node]) if each is not None)
        lengths = argument(offsets)
        return [argument(indices), indices, argument(lengths), lengths, offsets, *weights]

    def parts(self, node: fx.Node, read: Callable[[fx.Node], Any]) -> list[LookedUp]:
        """Returns what each of several lookups' results depends on that a call joins; nothing if it joins none."""
        return [self._looked_up(self._calls[node], member, read) for member in self._members[node]]

    def is_split(self, node: fx.Node) -> bool:
        """Whether a call cuts what a lookup returns into what each that it joins returns."""
        if node.target not in (SPLIT_FEATURES, aten.split_with_sizes.default):
            return False
        members = self._members.get(argument(node))
        return bool(members) and self._is_split(node, members)  # type: ignore[arg-type]

    def _looked_up(self, call: LookupCall, member: _Member, read: Callable[[fx.Node], Any]) -> LookedUp:
        is_reached = call.node in self._reached
        tables = frozenset(table.weights for table in member.tables) if is_reached else frozenset[int]()
        return LookedUp((*_key(call, member, read), self._trained_by(call)), tables)

    def _is_split(self, node: fx.Node, members: Sequence[_Member]) -> bool:
        args = node.args[2:] if node.target == SPLIT_FEATURES else node.args[1:]
        if node.kwargs or any(args[1:]) or not self._facts.guessed.isdisjoint(node.all_input_nodes):
            return False
        given: Any = args[0]
        sizes = [size_expression(self._facts[each] if isinstance(each, fx.Node) else each) for each in given]
        shapes = [[self._facts[each].shape[0] for each in member.bags[:2]] for member in members]  # type: ignore[index]
        if node.target != SPLIT_FEATURES:
            return sizes == [size_expression(num_ids) for num_ids, _ in shapes]
        are_dims = node.args[1] == [sum(table.dim for table in each.tables) for each in members]
        bags = [(ends - 1) // len(each.tables) for (_, ends), each in zip(shapes, members, strict=True)]
        return are_dims and sizes == [*map(size_expression, bags)]

    def _trained_by(self, call: LookupCall) -> Hashable:
        """Returns which outputs' gradients let the lookup update its tables, as far as that makes a difference."""
        outputs = self._reached.get(call.node, frozenset())
        return bool(outputs) if call.effect_without_gradient() is None else outputs


def _bags(call: LookupCall) -> tuple[fx.Node | None, ...]:
    return tuple(call.arguments[name] for name in ("indices", "offsets", "indice_weights"))


def _member(call: LookupCall, bags: tuple[fx.Node | None, ...], features: slice, end: int | None = None) -> _Member:
    layout = call.layout()
    weights, *states = call.state_tensors
    first = min(layout.first_rows[features])
    places = zip(
        layout.weights_offsets[features],
        layout.momentum1_offsets[features] or layout.weights_offsets[features],
        layout.dims[features],
        layout.first_rows[features],
        strict=True,
    )
    tables = tuple(
        _Table(
            weights.data_ptr() + place * weights.element_size(),
            states[0].data_ptr() + state * states[0].element_size() if states else 0,
            dim,
            row - first,
        )
        for place, state, dim, row in places
    )
    return _Member(bags, tables, (layout.num_rows if end is None else end) - first)


def _members(call: LookupCall) -> list[_Member]:
    """Returns the lookups whose bags a call has joined; none if it has joined none, or of one table."""
    indices, offsets, weights = _bags(call)
    join = indices.args[0] if indices is not None and indices.target is operator.getitem else None
    if not isinstance(join, fx.Node) or join.target != JOIN_BAGS or indices.args != (join, 0):  # type: ignore[union-attr]
        return []
    if not _is_cumsum_of(offsets, join):
        return []
    ids, ends, num_features, _ = join.args
    if weights is not None and (weights.target != aten.cat.default or len(weights.args) != 1 or weights.kwargs):
        return []
    parts: Any = [None] * len(ids) if weights is None else weights.args[0]  # type: ignore[arg-type]
    starts = [0, *accumulate(num_features)]  # type: ignore[arg-type]
    layout = call.layout()
    if len(layout.dims) != starts[-1] or min(num_features) < 1:  # type: ignore[arg-type]
        return []
    rows = [*(min(layout.first_rows[slice(*place)]) for place in pairwise(starts[1:])), layout.num_rows]
    members = [
        _member(call, bags, slice(*place), row)
        for bags, place, row in zip(zip(ids, ends, parts, strict=True), pairwise(starts), rows, strict=True)  # type: ignore[arg-type]
    ]
    itemsize = call.state_tensors[0].element_size()
    memory = sorted(place for member in members for place in member.memory(itemsize))
    is_apart = all(one[1] <= two[0] for one, two in pairwise(memory))
    return members if is_apart else []


def _is_cumsum_of(offsets: fx.Node | None, join: fx.Node) -> bool:
    if offsets is None or offsets.target != complete_cumsum():
        return False
    view = argument(offsets)
    return (
        view.target == aten.view.default
        and list(view.args[1:]) == [[-1]]
        and argument(view).target is operator.getitem
        and argument(view).args == (join, 1)
    )


def _is_consistent(call: LookupCall) -> bool:
    """Whether the arguments that follow from the tables do."""
    arguments, layout = call.arguments, call.layout()
    cache = arguments["aux_tensor"][_CACHE_LOCATIONS]
    lengths = {len(each) for each in (layout.dims, layout.first_rows, layout.weights_offsets)}
    return (
        {len(layout.momentum1_offsets) or len(layout.dims)} == lengths
        and arguments["total_D"] == sum(layout.dims)
        and arguments["max_D"] == max(layout.dims)
        and arguments["total_hash_size_bits"] == int(math.log2(layout.num_rows) + 1)
        and tuple(arguments["aux_int"][INFO_B]) == tuple(layout.info_b())
        and (arguments["aux_bool"][MIXED_D] or len(set(layout.dims)) == 1)
        and cache is not None
        and cache.meta["val"].numel() == 0
    )


def _key(call: LookupCall, member: _Member, read: Callable[[fx.Node], Any]) -> tuple[Hashable, ...]:
    trigger = call.arguments[_TRIGGER]
    others = {name: value for name, value in call.arguments.items() if name not in (*_LEFT_OUT, _TRIGGER)}
    # An input lets autograd reach the lookup, if it has a gradient; another one counts steps.
    others[_TRIGGER] = has_gradient(trigger) if trigger.op == "placeholder" else trigger
    args = evaluated([*member.bags, call.settings(), others], read)
    return ("call", str(call.node.target), freeze(args), (member.tables, member.num_rows))
