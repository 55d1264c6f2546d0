"""Lookups of distinct tables by equal optimizers become one, and so do their backward updates."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from weakref import ref

import torch
from torch import fx

from graphpasses._torch.dynamo import guard_condition, guard_identity
from graphpasses._torch.storage import addresses
from graphpasses.agreement import CollectiveSequence, Question
from graphpasses.analysis.dependencies import grad_modes, place_nodes
from graphpasses.analysis.effects import has_gradient, launches_collective, reached_outputs
from graphpasses.analysis.levels import call_levels, independent_groups, sort_by_level
from graphpasses.embedding.arena import Arena
from graphpasses.embedding.emit_lookup import emit_lookup_like
from graphpasses.embedding.join_cost import BatchOfBags, padding_cost, plan_joins
from graphpasses.embedding.joined_bits import find_difference
from graphpasses.fbgemm.lookups import LookupCall, TableLayout
from graphpasses.fbgemm.names import complete_cumsum
from graphpasses.graph import DynamoGraph, Stage, TrainGraph
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten

# What a lookup reads of the batch.
_BAGS = ("indices", "offsets", "indice_weights")
_PLACES = {"cpu": "host", "cuda": "dev"}  # FBGEMM's, in the names of tensors

# Of each lookup, by the FQN of its module, the number of samples; None if nothing is known of them.
_Sizes = Mapping[str, int | None]


def _largest(everyone: Sequence[_Sizes]) -> _Sizes:
    """Returns for each lookup the largest batch of the ranks that have it."""
    largest: dict[str, int | None] = {}
    for module, size in (item for sizes in everyone for item in sizes.items()):
        known = [each for each in (size, largest.get(module)) if each is not None]
        largest[module] = max(known, default=None)
    return largest


# What a rank that compiles again alone sees does not count: its plan stays that of all.
_BATCH_SIZES: Question[_Sizes, _Sizes] = Question("fuse-tbe", "batch sizes", _largest, lambda agreed, own: "")


def _plan(graph: DynamoGraph) -> tuple[list[tuple[LookupCall, ...]], tuple[fx.Node, ...]]:
    """Returns which lookups become one, and an order of the graph's nodes in which those of a group are adjacent."""
    calls = LookupCall.all(graph)
    bags = _agree_on_bags(graph, calls)
    memories = Counter(address for value in graph.live for address in addresses(value))
    candidates = {}
    for call in calls:
        reason = _reject_reason(call, memories)
        if reason is None:
            candidates[call.node] = call
        elif len(calls) > 1:
            graph.note(f"the lookup of {call.module} is left alone: {reason}")
    levels = call_levels(graph.graph, candidates.__contains__, in_turn=launches_collective)
    modes, reached = grad_modes(graph.graph), reached_outputs(graph.graph)

    def key(node: fx.Node) -> Hashable:
        call = candidates[node]
        arenas = tuple(map(id, map(Arena.containing, call.state_tensors)))  # two arenas cannot become one
        outputs = reached.get(node, frozenset())
        # With one gradient of several, eager updates some of the tables.
        trained_by = bool(outputs) if call.effect_without_gradient() is None else outputs
        return modes[node], trained_by, arenas, call.settings()

    groups = [
        part
        for group in independent_groups(candidates, levels, key)
        for part in _worth_joining(graph, [candidates[node] for node in group], bags)
    ]
    tables = Counter(id(arena) for call in candidates.values() if (arena := _arena(call)) is not None)
    rewritten = []
    for group in groups:
        number = tables[id(_arena(group[0]))]
        if len(group) > 1 and group[0].device.type != "cpu" and (difference := find_difference(group)):
            graph.note(f"{_name(group)} stay apart: {difference}")
            continue
        # Lookups in one arena write one tensor, those that are alone, too, so that their writes stay in order.
        if len(group) > 1 or number > 1:
            rewritten.append(group)
        elif number == 1 and len(calls) > 1:
            graph.note(f"the lookup of {group[0].module} is left alone: a model compiled before fused it with others")
    return rewritten, sort_by_level(graph.graph, levels, candidates.__contains__)


def _agree_on_bags(graph: DynamoGraph, calls: Sequence[LookupCall]) -> dict[fx.Node, BatchOfBags]:
    """Returns what each lookup looks up, with the batch sizes on which all ranks agree, so that they join alike."""
    bags = {call.node: BatchOfBags.of(call) for call in calls}
    own = _largest([{call.module: bags[call.node].batch_size} for call in calls])
    agreed = CollectiveSequence(graph).agree(_BATCH_SIZES, own)
    return {
        call.node: replace(bags[call.node], batch_size=agreed.get(call.module, own[call.module])) for call in calls
    }


def _worth_joining(
    graph: DynamoGraph, calls: Sequence[LookupCall], bags_of: Mapping[fx.Node, BatchOfBags]
) -> list[tuple[LookupCall, ...]]:
    """Returns which of some lookups become one, of those that can; notes which do not, and why."""
    bags = [bags_of[call.node] for call in calls]
    parts = plan_joins(bags)
    for larger, smaller in pairwise(parts):
        names = " and ".join(_name([calls[index] for index in part]) for part in (smaller, larger))
        padded = [bags[index] for index in smaller]
        before, after = (max(bags[index].batch_size or 0 for index in part) for part in (smaller, larger))
        cost = f"{padding_cost(padded, after) / 1e3:,.1f} ms or more per step"
        reason = f"padding {before:,} samples to {after:,} would take {cost}"
        if padded[0].batch_size is None:
            reason = "the batch size of the first is not known"
        graph.note(f"{names} stay apart: {reason}")
    return [tuple(calls[index] for index in part) for part in parts]


def _name(calls: Sequence[LookupCall]) -> str:
    return " to ".join(dict.fromkeys((calls[0].module, calls[-1].module)))


def _arena(call: LookupCall) -> torch.Tensor | None:
    """Returns the memory in which a lookup's tables lie together with others; None if in none."""
    table = call.state_tensors[0]
    arena = Arena.containing(table)
    return None if arena is table else arena


def _reject_reason(call: LookupCall, memories: Mapping[int, int]) -> str | None:
    """Returns why a lookup cannot be part of another; None if it can."""
    if (reason := call.reject_reason()) is not None:
        return reason
    is_shared = any(memories[address] > 1 for tensor in call.state_tensors for address in addresses(tensor))
    if is_shared or any(len(node.users) > 1 for node in call.states):
        return "the model also reads its tables elsewhere; joint updates of a row change the result"
    weights = call.arguments["indice_weights"]
    if weights is not None and has_gradient(weights) and sum(map(has_gradient, weights.users)) > 1:
        return "the weights of its ids get gradients from elsewhere, too, which are added in an order"
    return next(filter(None, map(Arena.reject_reason, call.state_tensors)), None)


def _fuse(graph: DynamoGraph, calls: Sequence[LookupCall]) -> None:
    """Emits one call after the last of ``calls``, which no longer depend on anything that comes after them."""
    first, last = calls[0], calls[-1]
    for state in (state for call in calls for state in call.states):
        guard_identity(state)  # other tables do not lie in the arenas: for them it is another graph
    modules = [call.module for call in calls]
    name = _name(calls)
    states, starts = [], []
    tensors_by_state = zip(*(call.state_tensors for call in calls), strict=True)
    for key, tensors in zip(("weights", "momentum1"), tensors_by_state, strict=False):
        arena = Arena.of(tensors, [f"{module}.{key}_{_PLACES[first.device.type]}" for module in modules])
        states.append(graph.add_input(arena.flat, f"{name}.{key}"))
        starts.append(arena.offsets)
        arena.check_inputs(graph, [call.arguments[key][0] for call in calls])
    _guard_rates(calls)

    layout = TableLayout.join([call.layout() for call in calls], *starts)
    with graph.graph.inserting_before(last.node.next):
        bags = _join(graph, calls) if len(calls) > 1 else {key: first.arguments[key] for key in _BAGS}
        fused = emit_lookup_like(graph, first, layout, states, bags, name=name)
        outputs = _split(graph, calls, fused) if len(calls) > 1 else [fused]
    for call, output in zip(calls, outputs, strict=True):
        graph.replace(call.node, output)


def _join(graph: DynamoGraph, calls: Sequence[LookupCall]) -> dict[str, fx.Node | None]:
    """Emits what the lookup reads of the batch; returns it by the names of the lookup's arguments."""
    like = calls[-1].node
    indices, offsets, weights = ([call.arguments[key] for call in calls] for key in _BAGS)
    num_features, modules = [call.num_features for call in calls], [call.module for call in calls]
    joined = graph.emit(JOIN_BAGS, (indices, offsets, num_features, modules), like=like)
    ids, lengths = [graph.emit(operator.getitem, (joined, i), like=like) for i in range(2)]
    lengths = graph.emit(aten.view.default, (lengths, [-1]), like=like)
    ends = graph.emit(complete_cumsum(), (lengths,), like=like)
    joint_weights = None if weights[0] is None else graph.emit(aten.cat.default, (weights,), like=like)
    return dict(zip(_BAGS, (ids, ends, joint_weights), strict=True))


def _split(graph: DynamoGraph, calls: Sequence[LookupCall], fused: fx.Node) -> list[fx.Node]:
    """Emits what each lookup returned, in memory of its own."""
    if calls[0].is_pooled:
        dims = [call.arguments["total_D"] for call in calls]
        sizes = [_batch_size(graph, call) for call in calls]
        parts = graph.emit(SPLIT_FEATURES, (fused, dims, sizes), like=fused)
        return [graph.emit(operator.getitem, (parts, i), like=call.node) for i, call in enumerate(calls)]
    sizes = [graph.emit(aten.sym_size.int, (call.arguments["indices"], 0), like=call.node) for call in calls]
    parts = graph.emit(aten.split_with_sizes.default, (fused, sizes), like=fused)
    views = [graph.emit(operator.getitem, (parts, i), like=call.node) for i, call in enumerate(calls)]
    return [graph.emit(aten.clone.default, (view,), like=view) for view in views]


def _batch_size(graph: DynamoGraph, call: LookupCall) -> fx.Node:
    num_offsets = graph.emit(aten.sym_size.int, (call.arguments["offsets"], 0), like=call.node)
    num_bags = graph.emit(operator.sub, (num_offsets, 1), like=call.node)
    return graph.emit(operator.floordiv, (num_bags, call.num_features), like=call.node)


def _guard_rates(calls: Sequence[LookupCall]) -> None:
    """Has Dynamo compile again when the learning rates part: a fused lookup's backward knows one."""
    rates = [call.arguments["learning_rate_tensor"] for call in calls]
    for rate in rates:
        guard_identity(rate)
    tensors = [ref(call.inputs[rate]) for call, rate in zip(calls, rates, strict=True)]

    def agree() -> bool:
        return len({None if (rate := get()) is None else rate.item() for get in tensors}) == 1

    modules = ", ".join(call.module for call in calls)
    guard_condition(rates[0], agree, f"{modules} have one learning rate")


@dataclass(frozen=True)
class FuseTBE(GraphPass):
    """Makes lookups of distinct tables one call, across modules and sharding types; autograd makes one of backward.

    What the pass changes (of a lookup's arguments only data is shown)::

          a = value('a')  # i64[6]
          a_offsets = value('a_offsets')  # i64[3]
          a_weights_host = parameter('a.weights_host')  # f32[80]
          b = value('b')  # i64[6]
          b_offsets = value('b_offsets')  # i64[3]
          b_weights_host = parameter('b.weights_host')  # f32[160]
          indices = a.clone()  # i64[6]
          offsets = a_offsets.to(dtype=i64)  # i64[3]
          bounds_check_indices = fbgemm.bounds_check_indices(indices, offsets, ...)
        - lookup = fbgemm.lookup_sgd([a_weights_host], indices, offsets, ...)  # f32[2, 4]
          indices_1 = b.clone()  # i64[6]
          offsets_1 = b_offsets.to(dtype=i64)  # i64[3]
          bounds_check_indices_1 = fbgemm.bounds_check_indices(indices_1, offsets_1, ...)
        - lookup_1 = fbgemm.lookup_sgd([b_weights_host], indices_1, offsets_1, ...)  # f32[2, 8]
        - cat = torch.cat([lookup, lookup_1], 1)  # f32[2, 12]
        + join_bags = graphpasses.join_bags([indices, indices_1], [offsets, offsets_1], [1, 1], ['a', 'b'])
        + getitem = join_bags[0]  # i64[12]
        + getitem_1 = join_bags[1]  # i64[2, 2]
        + view = aten.view(getitem_1, [-1])  # i64[4]
        + asynchronous_complete_cumsum = fbgemm.asynchronous_complete_cumsum(view)  # i64[5]
        + lookup = fbgemm.lookup_sgd(getitem, asynchronous_complete_cumsum, ...)  # f32[2, 12]
        + sym_size = aten.sym_size.int(offsets, 0)  # 3
        + sub = operator.sub(sym_size, 1)  # 2
        + floordiv = operator.floordiv(sub, 1)  # 2
        + sym_size_1 = aten.sym_size.int(offsets_1, 0)  # 3
        + sub_1 = operator.sub(sym_size_1, 1)  # 2
        + floordiv_1 = operator.floordiv(sub_1, 1)  # 2
        + split_features = graphpasses.split_features(lookup, [4, 8], [floordiv, floordiv_1])
        + getitem_2 = split_features[0]  # f32[2, 4]
        + getitem_3 = split_features[1]  # f32[2, 8]
        + cat = torch.cat([getitem_2, getitem_3], 1)  # f32[2, 12]
          return cat  # output 0

    Lookups are fused if they agree in optimizer, hyperparameters, dtype, pooling and device (without pooling, in
    embedding dimension, too) and do not depend on each other, and if their batches are equal, or padding the
    smaller ones costs less than a lookup (:mod:`graphpasses.embedding.join_cost`). Sizes are those of the traced
    batches, of each lookup that of the rank where it is largest: ranks tell each other, so that they join the same.

    The tables and optimizer states of a lookup move into one memory (:class:`~graphpasses.embedding.arena.Arena`);
    every tensor that aliases them follows. Each call checks that they still lie there. Dynamo compiles again, on one
    rank alone if need be, for other tables, and where the learning rates of fused lookups become different.

    On a GPU, lookups of one largest dimension are joined if its kernels give one call the bits of several: small
    tables are looked up and updated both ways when the model is compiled. A table that the model looks up twice is
    left alone: its optimizer would see one gradient where it sees two. Collectives keep their order, so where
    TorchRec shards several modules ``hoist-input-dists`` comes before.

    Raises (from ``rewrite``):
        ArenaError: two lookups claim one memory.
        AgreementError: the ranks compile different collectives.

    Example:
        >>> import torchrec  # graphpasses.compile traces FBGEMM's modules where TorchRec is loaded
        >>> from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        >>> class Tables(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         table = (9, 4, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)
        ...         self.a, self.b = (tbe.SplitTableBatchedEmbeddingBagsCodegen([table]) for _ in "ab")
        ...     def forward(self, first, second):
        ...         return self.a(*first) + self.b(*second)
        >>> report = graphpasses.CompileReport()
        >>> pipeline = graphpasses.Pipeline((FuseTBE(),))
        >>> compiled = graphpasses.compile(Tables(), pipeline=pipeline, inner="aot_eager", report=report)
        >>> first, second = [(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])) for _ in range(2)]
        >>> compiled(first, second).sum().backward()  # one update
        >>> report.by_graph["graph 0, dynamo"]["fuse-tbe"].num_rewrites
        2
        >>> torch.compiler.reset()
    """

    name = "fuse-tbe"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.DYNAMO})
    runs_after = frozenset({"hoist-input-dists"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of lookups that became part of another."""
        graph = DynamoGraph.of(graph)
        groups, order = _plan(graph)
        if groups:
            place_nodes(graph.graph, order)
        for calls in groups:
            _fuse(graph, calls)
        return sum(map(len, groups))
