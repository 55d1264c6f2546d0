"""Lookups in tables of a graph that Dynamo traced: known by what they look up; one may join several."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpasses.analysis.effects import has_gradient
from graphpasses.fbgemm.lookups import INFO_B, MIXED_D, LookupCall
from graphpasses.fbgemm.names import complete_cumsum
from graphpasses.graph import DynamoGraph, argument
from graphpasses.graph.nodes import freeze
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.operators import AXIOMS
from graphpasses.proof.spelling import evaluated

aten = torch.ops.aten

FUSED = "fused lookups"
AXIOMS[FUSED] = (
    "a lookup of several lookups' bags in their distinct tables, by one optimizer, returns side by side what each of "
    "them returns, and its backward updates each table as theirs does"
)

# Arguments that a key says by tables and bags, and such as a fused lookup has of its first member.
_LEFT_OUT = (
    "weights", "momentum1", "D_offsets", "total_D", "max_D", "hash_size_cumsum", "total_hash_size_bits", "indices",
    "offsets", "indice_weights", "aux_tensor", "aux_int", "aux_bool", "learning_rate_tensor",
)  # fmt: skip
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
