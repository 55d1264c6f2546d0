"""FBGEMM's writing operators write in place: fused updates their tables, bounds checks their indices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch.schemas import FunctionalizedCall, WrittenView, bind_named, read_functionalized_call
from graphpasses.analysis.effects import Effects, nodes_in, operator_effects
from graphpasses.fbgemm.names import FBGEMM
from graphpasses.graph import Stage, TrainGraph, argument
from graphpasses.graph.nodes import is_empty, storages
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten


def _clone_keeps_strides(node: fx.Node) -> bool:
    """Whether a clone has the strides of the tensor, as the copy that ``auto_functionalized_v2`` makes has."""
    value = node.meta["val"]
    return statically_known_true(sym_eq(torch.empty_like(value).stride(), value.stride()))


class _Memory:
    """Who reads and who owns which memory. Every value of a written tensor has a storage of its own, still."""

    def __init__(self, graph: fx.Graph) -> None:
        self.last_reader: dict[StorageWeakRef, fx.Node] = {}
        self.returned = storages(*graph.output_node().all_input_nodes)
        self.owners: defaultdict[StorageWeakRef, set[fx.Node]] = defaultdict(set)
        self.written_back: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                for storage in storages(node):
                    self.owners[storage].add(node)
            elif node.target is aten.copy_.default:
                self.written_back.add(argument(node))
            self._read(node, operator_effects(node))

    def _read(self, node: fx.Node, effects: Effects) -> None:
        # A collective reads until it is waited for.
        users = node.users if effects.group is not None else ()
        reader = max((node, *users))
        for storage in storages(*effects.reads):
            self.last_reader[storage] = max(self.last_reader.get(storage, reader), reader)

    def why_copied(self, node: fx.Node, call: FunctionalizedCall, index: int) -> str | None:
        """Returns why base ``index`` of ``call`` cannot be written in place; None if it can."""
        base, old = call.bases[index], storages(call.bases[index])
        new = storages(*(user for user in node.users if user.args[1] == call.num_results + index))
        owners = {owner for storage in old for owner in self.owners[storage]}
        readers = [self.last_reader[storage] for storage in old if storage in self.last_reader]
        late = [reader for reader in readers if reader > node]
        others = [*nodes_in(call.reads), *(other for other in call.bases if other is not base)]
        if is_empty(base):
            return None
        if late:
            return f"{late[0].name} reads the old value afterwards"
        if not old.isdisjoint(self.returned):
            return "the graph returns the old value"
        if not old.isdisjoint(storages(*others)):
            return "another argument of the call shares its memory"
        if owners and (len(owners) > 1 or not owners <= self.written_back):
            return "its owner keeps the old value"
        if owners and not new.isdisjoint(self.returned):
            return "the graph returns the new value, too"
        for storage in new:
            self.owners[storage] = owners
        return None


def _plan(graph: TrainGraph) -> dict[fx.Node, set[int]]:
    """Returns the calls that become direct ones, and the numbers of the bases of which each writes copies."""
    memory = _Memory(graph.graph)
    fqns = {node: item.fqn for node, item in zip(graph.placeholders, graph.inputs, strict=True)}
    direct = {}
    for node in graph.graph.nodes:
        call = read_functionalized_call(node)
        if call is None or call.op.namespace != FBGEMM:
            continue
        copied = set()
        for index, base in enumerate(call.bases):
            reason = memory.why_copied(node, call, index)
            if reason is not None:
                copied.add(index)
                if base in fqns:
                    graph.note(f"{call.op} writes a copy of {fqns[base]}: {reason}")
        if all(_clone_keeps_strides(call.bases[index]) for index in copied):
            direct[node] = copied
        else:
            graph.note(f"{call.op} writes a copy of a tensor with gaps: left alone")
    return direct


def _emit_written(graph: TrainGraph, value: Any, bases: Sequence[fx.Node], *, like: fx.Node) -> Any:
    if isinstance(value, list):
        return [_emit_written(graph, item, bases, like=like) for item in value]
    if not isinstance(value, WrittenView):
        return value
    base = bases[value.base]
    return base if value.view is None else graph.emit(value.view, (base, *value.args), like=like)


def _emit_direct(graph: TrainGraph, node: fx.Node, copied: set[int]) -> tuple[fx.Node, list[fx.Node]]:
    """Returns the direct call, and its bases, which hold their new values after it."""
    call = read_functionalized_call(node)  # anew: bases may be what calls that are direct by now have written
    assert call is not None
    bases = [
        graph.emit(aten.clone.default, (base,), like=node) if index in copied else base
        for index, base in enumerate(call.bases)
    ]
    values = dict(call.reads)
    for name, written in call.writes.items():
        values[name] = _emit_written(graph, written, bases, like=node)
    args, kwargs = bind_named(call.op, values)
    return graph.emit(call.op, args, kwargs, like=node), bases


def _apply(graph: TrainGraph, node: fx.Node, copied: set[int]) -> None:
    with graph.graph.inserting_before(node):
        call, bases = _emit_direct(graph, node, copied)
    num_results = len(node.meta["val"]) - len(bases)
    for output in list(node.users):
        index: Any = output.args[1]
        if index < num_results > 1:
            output.args = (call, index)
            continue
        value = call if index < num_results else bases[index - num_results]
        if value is call or index - num_results in copied:
            graph.replace(output, value)
        else:
            graph.merge(output, value)
    graph.graph.erase_node(node)


@dataclass(frozen=True)
class ReinplaceTBEUpdates(GraphPass):
    """Makes fused updates write their tables, and bounds checks their indices, in place.

    AOTAutograd turns FBGEMM's writing operators into functions, which clone what they write, a whole table twice.
    What the pass changes::

          rows = value('rows')  # i64[1]
          ids = value('ids')  # i64[4]
          offsets = value('offsets')  # i64[2]
          warning = value('warning')  # i64[1]
        - written = auto_functionalized_v2(fbgemm.bounds_check_indices, rows, [ids, offsets, warning], ...)
        - getitem_1 = written[1]  # i64[4]
        - getitem_2 = written[2]  # i64[2]
        - getitem_3 = written[3]  # i64[1]
        - mul = aten.mul(getitem_1, 2)  # i64[4]
        - copy = aten.copy_.default(ids, getitem_1)  # i64[4]
        - copy_1 = aten.copy_.default(offsets, getitem_2)  # i64[2]
        - copy_2 = aten.copy_.default(warning, getitem_3)  # i64[1]
        + bounds_check_indices = fbgemm.bounds_check_indices(rows, ids, offsets, warning, ...)
        + mul = aten.mul(ids, 2)  # i64[4]
          return mul  # PlainAOTOutput(idx=0)

    A call writes in place where nobody after it, nor a collective that is under way, reads what was there before,
    the graph does not return that memory, and an input, if it is one, changes anyway. Otherwise it writes a clone;
    for inputs a note says why. Writes fix the order of nodes, so passes that join or drop calls come before this one.

    Example:
        >>> from torch.distributed.optim import _apply_optimizer_in_backward
        >>> bags = nn.EmbeddingBag(10, 4, mode="sum")
        >>> _apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        >>> report = graphpasses.CompileReport()
        >>> pipeline = graphpasses.recommender_pipeline(lower_embedding_bags=True)
        >>> compiled = graphpasses.compile(bags, pipeline=pipeline, inner="aot_eager", report=report)
        >>> compiled(torch.tensor([[1, 2]])).sum().backward()
        >>> report.by_graph["graph 0, backward"]["reinplace-tbe-updates"].num_rewrites
        1
    """

    name = "reinplace-tbe-updates"
    numerics = Numerics.BITWISE
    # Not joint graphs: their partitioner may run a node in both halves.
    stages = frozenset({Stage.FORWARD, Stage.BACKWARD})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of calls that are direct now."""
        planned = _plan(graph)
        for node, copied in planned.items():
            _apply(graph, node, copied)
        for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
            if argument(node) is argument(node, 1):
                node.replace_all_uses_with(argument(node))
                graph.graph.erase_node(node)
        return len(planned)
