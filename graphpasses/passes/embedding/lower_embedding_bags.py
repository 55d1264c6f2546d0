"""``embedding_bag`` calls of a plain model become lookups of FBGEMM's table-batched embeddings (TBE)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakMethod

import torch
from torch import fx

from graphpasses._torch.dynamo import guard_condition, guard_identity
from graphpasses._torch.symbols import expression
from graphpasses.analysis.dependencies import grad_modes, place_nodes
from graphpasses.analysis.effects import reached_outputs
from graphpasses.analysis.levels import call_levels, grouped, independent_groups, sort_by_level
from graphpasses.embedding.arena import Arena
from graphpasses.embedding.backward_checks import check_gradient_arrives, one_backward_per_forward
from graphpasses.embedding.bag_calls import BagCall, read_bag_calls
from graphpasses.embedding.emit_lookup import emit_lookup
from graphpasses.embedding.fused_update import FusedUpdate
from graphpasses.embedding.torchrec.fake_kernels import fake_kernels
from graphpasses.fbgemm.lookups import TableLayout
from graphpasses.graph import DynamoGraph, Stage, TrainGraph
from graphpasses.graph.nodes import refresh_values
from graphpasses.ops.pack_bags import PACK_BAGS
from graphpasses.passes.runner import GraphPass, Numerics

# FBGEMM's `PoolingMode`.
_POOLING_MODES = {"sum": 0, "mean": 1}


def _plan(graph: DynamoGraph) -> tuple[list[tuple[BagCall, ...]], tuple[fx.Node, ...]]:
    """Returns the calls that become one lookup each, table by table, and an order in which they are adjacent."""
    calls, left_alone = read_bag_calls(graph)
    levels = call_levels(graph.graph, calls.__contains__)
    modes, reached = grad_modes(graph.graph), reached_outputs(graph.graph)

    def key(node: fx.Node) -> tuple[object, ...]:
        # Each table's optimizer counts the steps in which its gradient came.
        outputs = reached.get(node, frozenset()) if calls[node].kind.form.states else None
        return calls[node].kind, modes[node], outputs

    groups = independent_groups(calls, levels, key)
    num_groups = Counter(fqn for group in groups for fqn in {calls[node].fqn for node in group})
    scattered = {fqn for fqn, number in num_groups.items() if number > 1}
    lookups = []
    for group in groups:
        whole = (calls[node] for node in group if calls[node].fqn not in scattered)
        by_table = grouped(whole, key=lambda call: call.fqn)
        if by_table:
            lookups.append(tuple(call for table in by_table for call in table))
    reason = "its calls differ, or one needs what the other looks up: they cannot be one update"
    for table, why in (left_alone | dict.fromkeys(scattered, reason)).items():
        graph.note(f"{table} is looked up as before: {why}")
    return lookups, sort_by_level(graph.graph, levels, calls.__contains__)


def _layout(calls: Sequence[BagCall], arena: Arena, update: FusedUpdate) -> TableLayout:
    rows = {call.fqn: call.table.size(0) for call in calls}
    first_rows = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))
    weights = dict(zip(rows, arena.offsets, strict=True))
    states = dict(zip(rows, update.arenas["sum"].offsets, strict=True)) if update.arenas else {}
    return TableLayout(
        dims=tuple(call.table.size(1) for call in calls),
        first_rows=tuple(first_rows[call.fqn] for call in calls),
        num_rows=sum(rows.values()),
        weights_offsets=tuple(weights[call.fqn] for call in calls),
        momentum1_offsets=tuple(states[call.fqn] for call in calls if states),
    )


def _emit_lookup(graph: DynamoGraph, calls: Sequence[BagCall], outputs: Collection[int]) -> fx.Node:
    """Emits the lookup that looks up what ``calls``, on which some outputs depend, do; returns [B, total_D]."""
    tables = {call.fqn: call.table for call in calls}
    name = " to ".join(dict.fromkeys((calls[0].fqn, calls[-1].fqn)))
    arena = Arena.of(list(tables.values()), list(tables))
    update = FusedUpdate.of(calls[0].kind.form, tables)
    weights = {call.fqn: call.weight for call in calls}.values()
    for weight in weights:
        guard_identity(weight)  # for other tables than those in the arena it is another graph
    arena.check_inputs(graph, weights)
    graph.checks += (update.refresh,)
    is_current = WeakMethod(update.is_current)
    guard_condition(
        calls[0].weight,
        lambda: (method := is_current()) is not None and method(),
        f"the optimizers in backward of {', '.join(tables)} are one {update.form.name}",
    )
    if outputs:
        num_updates = graph.remembered.setdefault(arena, [0])
        graph.backward_checks += (one_backward_per_forward(name, outputs, num_updates),)
        if update.form.states:
            check = check_gradient_arrives(name, outputs, "counts a step")
            graph.backward_checks += (lambda: check,)
    flat = graph.add_input(arena.flat, f"{name}.weights_host")
    bags, layout = _emit_bags(graph, calls), _layout(calls, arena, update)
    return emit_lookup(graph, layout, flat, bags, update, name=name, like=calls[0].node)


def _emit_bags(graph: DynamoGraph, calls: Sequence[BagCall]) -> dict[str, Any]:
    """Emits what a lookup reads of the batch; returns it by the names of the lookup's arguments."""

    def emit(target: Callable[..., Any], *args: Any) -> fx.Node:
        return graph.emit(target, args, like=calls[0].node)

    packed = emit(
        PACK_BAGS,
        [call.ids for call in calls],
        [call.offsets for call in calls],
        [call.table.size(0) for call in calls],
        [call.fqn for call in calls],
        calls[0].kind.include_last_offset,
    )
    weights = [emit(torch.flatten, call.weights) for call in calls if call.weights is not None]
    return {
        "indices": emit(operator.getitem, packed, 0),
        "offsets": emit(operator.getitem, packed, 1),
        "pooling_mode": _POOLING_MODES[calls[0].kind.mode],
        "indice_weights": emit(torch.cat, weights) if weights else None,
    }


def _replace_calls(graph: DynamoGraph, calls: Sequence[BagCall], output: fx.Node) -> None:
    """Gives the users of ``calls`` their columns of ``output``, and erases the calls."""
    ends = accumulate((call.table.size(1) for call in calls), initial=0)
    columns = dict(zip((call.node for call in calls), pairwise(ends), strict=True))
    for node in columns:
        # What is looked up is float32.
        for user in [each for each in node.users if each.op == "call_method" and each.target == "float"]:
            user.replace_all_uses_with(node)
            graph.graph.erase_node(user)
    for cat in dict.fromkeys(user for node in columns for user in node.users if user.target is torch.cat):
        _join_columns(graph, cat, output, columns)
    for node, (start, stop) in columns.items():
        if node.users:
            part = output
            if len(calls) > 1:
                with graph.graph.inserting_before(node):
                    part = graph.emit(operator.getitem, (output, (slice(None), slice(start, stop))), like=node)
                    layout = {"memory_format": torch.contiguous_format}
                    part = graph.emit(torch.clone, (part,), layout, like=node)
            node.replace_all_uses_with(part)
        graph.graph.erase_node(node)


def _join_columns(graph: DynamoGraph, cat: fx.Node, output: fx.Node, columns: dict[fx.Node, tuple[int, int]]) -> None:
    """Lets ``cat`` read columns of ``output`` that stand side by side as one; all of them are ``output`` itself."""
    arguments: dict[str, Any] = dict(zip(("tensors", "dim"), cat.args, strict=False)) | cat.kwargs
    if arguments.keys() != {"tensors", "dim"} or arguments["dim"] not in (1, -1):
        return
    parts: list[fx.Node | tuple[int, int]] = []
    for tensor in arguments["tensors"]:
        start, stop = columns.get(tensor, (-1, -1))
        match parts:
            case [*_, (first, last)] if last == start:
                parts[-1] = (first, stop)
            case _:
                parts.append(tensor if start < 0 else (start, stop))
    if parts == [(0, output.meta["val"].size(1))] and all(set(node.users) == {cat} for node in columns):
        cat.replace_all_uses_with(output)
        graph.graph.erase_node(cat)
        return

    def read(part: fx.Node | tuple[int, int]) -> fx.Node:
        if isinstance(part, fx.Node):
            return part
        return graph.emit(operator.getitem, (output, (slice(None), slice(*part))), like=cat)

    with graph.graph.inserting_before(cat):
        cat.args, cat.kwargs = (list(map(read, parts)), 1), {}


def _apply(graph: DynamoGraph, lookups: Iterable[Sequence[BagCall]], order: Sequence[fx.Node]) -> None:
    reached, renamed = reached_outputs(graph.graph), list[fx.Node]()
    place_nodes(graph.graph, order)
    for calls in lookups:
        outputs = frozenset().union(*(reached.get(call.node, ()) for call in calls))
        first = next(node for node in graph.graph.nodes if node in {call.node for call in calls})
        with graph.graph.inserting_before(first):
            output = _emit_lookup(graph, calls, outputs)
        # Where both dims of ids vary, torch writes the number of bags, that of rows, as a quotient.
        if any(expression(call.node.meta["val"].size(0)) != expression(output.meta["val"].size(0)) for call in calls):
            renamed.append(output)
        _replace_calls(graph, calls, output)
    refresh_values(graph.graph, renamed)


@dataclass(frozen=True)
class LowerEmbeddingBags(GraphPass):
    """Replaces the ``embedding_bag`` calls of a plain model by lookups of FBGEMM's TBE, many tables in one.

    What the pass changes::

          a_weight = parameter('a.weight')  # f32[10, 4]
          ids = value('ids')  # i64[6]
          offsets = value('offsets')  # i64[2]
          b_weight = parameter('b.weight')  # f32[20, 4]
        - embedding_bag = torch.nn.functional.embedding_bag(ids, a_weight, offsets, ...)  # f32[2, 4]
        - embedding_bag_1 = torch.nn.functional.embedding_bag(ids, b_weight, offsets, ...)  # f32[2, 4]
        - cat = torch.cat([embedding_bag, embedding_bag_1], 1)  # f32[2, 8]
        - return cat  # output 0
        + pack_bags = graphpasses.pack_bags([ids, ids], [offsets, offsets], [10, 20], ['a.weight', 'b.weight'], False)
        + getitem = pack_bags[0]  # i64[12]
        + getitem_1 = pack_bags[1]  # i64[5]
        + lookup = fbgemm.lookup_sgd(getitem, getitem_1, ...)  # f32[2, 8]
        + return lookup  # output 0

    It lowers tables whose SGD, Adagrad or RowWiseAdagrad was put into backward by ``apply_optimizer_in_backward``:
    they get a fused update in place of a gradient. There is one lookup per optimizer and its options, pooling, and
    batch size, weighted or not. The update reads the optimizers' learning rate at each step and writes their state.
    Where rates become different, options change or a hook is added, Dynamo compiles again. Parameters stay the
    objects that they were; their memory moves, see :class:`~graphpasses.embedding.arena.Arena`.

    Sums of bags, weighted or not, have eager's bits, averages do not. A row to which several ids of a batch point
    adds their gradients in another order. Where ids are distinct, tables under SGD and Adagrad's sums have eager's
    bits; tables under Adagrad and RowWiseAdagrad, the latter's sums, and gradients of weights of ids do not.

    Left alone and noted are tables without an optimizer in backward, or with one that has no fused form; those that
    are not float32 parameters on the CPU; calls with ``padding_idx``, ``max_norm``, ``scale_grad_by_freq``,
    ``sparse`` or ``mode="max"``; and tables that the model also reads in other ways, or whose calls cannot be one
    lookup. As with TorchRec's fused modules, a backward over several calls of the compiled model, or graphs, makes
    one update for each where eager makes one of their sum.

    Raises, at a step:
        IdError: an id is not a row of its table, or offsets make no bags.
        ArenaError: a table was moved or replaced.

    Example:
        >>> from torch.distributed.optim import _apply_optimizer_in_backward
        >>> bags = nn.EmbeddingBag(10, 4, mode="sum")
        >>> _apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        >>> report = graphpasses.CompileReport()
        >>> pipeline = graphpasses.Pipeline((LowerEmbeddingBags(),))
        >>> compiled = graphpasses.compile(bags, pipeline=pipeline, inner="aot_eager", report=report)
        >>> compiled(torch.tensor([[1, 2]])).sum().backward()  # which updates rows 1 and 2
        >>> report.by_graph["graph 0, dynamo"]["lower-embedding-bags"].num_rewrites
        1
    """

    name = "lower-embedding-bags"
    numerics = Numerics.ROUNDING
    stages = frozenset({Stage.DYNAMO})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of calls that were replaced."""
        graph = DynamoGraph.of(graph)
        lookups, order = _plan(graph)
        if lookups:
            with fake_kernels():
                _apply(graph, lookups, order)
        return sum(map(len, lookups))
