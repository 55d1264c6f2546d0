"""Lookups that a forward pass repeats, as when a shared module is called again with the same features."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.schemas import read_functionalized_call
from graphpasses._torch.symbols import can_unify_sizes, unify_sizes
from graphpasses.agreement import CollectiveSequence, Question, breaks_class, common_classes
from graphpasses.analysis.backward import backward_nodes
from graphpasses.analysis.effects import operator_effects
from graphpasses.fbgemm.names import BOUNDS_CHECK, TRACED_LOOKUP
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, argument
from graphpasses.graph.nodes import attribute, constant_bits, freeze, is_empty, storages
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten

_UNINITIALIZED = (
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
)  # fmt: skip


def _called(node: fx.Node) -> str:
    """Returns the name of the operator of a functionalized call; ``""`` for any other node."""
    call = read_functionalized_call(node)
    return "" if call is None else str(call.op)


def _is_function(node: fx.Node) -> bool:
    """Whether the value of a call follows from its inputs, and computing it does nothing else."""
    if (name := _called(node)) == BOUNDS_CHECK:
        return str(_warning(node).meta["val"].device) == "cpu"
    if name:
        return TRACED_LOOKUP.fullmatch(name) is not None
    if node.target in _UNINITIALIZED:
        return is_empty(node)
    if node.target == aten._assert_scalar.default:
        return True
    effects = operator_effects(node)
    if effects.has_hidden_state or effects.writes:
        return False
    if effects.group is not None:
        return node.target == ALL_TO_ALL
    value = node.meta.get("val")
    kinds = (torch.Tensor, torch.SymInt, torch.SymBool, int, type(None))
    return value is not None and all(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value))


def _bases(call: fx.Node) -> list[fx.Node]:
    return cast(list[fx.Node], call.kwargs["_all_bases"])


def _warning(bounds_check: fx.Node) -> fx.Node:
    """Returns the number of bad ids that a bounds check is given, to be written."""
    return _bases(bounds_check)[cast(int, bounds_check.kwargs["_warning_base_index"])]


def _counter(bounds_check: fx.Node) -> fx.Node:
    """Returns that number before the first of all checks that write it."""
    warning = _warning(bounds_check)
    while warning.target is operator.getitem and _called(argument(warning)) == BOUNDS_CHECK:
        warning = _warning(argument(warning))
    return warning


def _key(node: fx.Node, repeated: Mapping[fx.Node, fx.Node]) -> object:
    """Returns what only nodes of equal value have in common; None if no other may have the node's value."""
    if node.op == "get_attr":
        value = attribute(node)
        return constant_bits(value) if type(value) is torch.Tensor else None
    if node.op != "call_function" or not _is_function(node):
        return None
    inputs: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: repeated.get(n, n))
    args, kwargs = inputs
    if node.target == aten._assert_scalar.default:
        return node.target, args[0]  # without the message
    if _called(node) == BOUNDS_CHECK:
        # On CPU a check overwrites the count of the one before, or leaves it.
        bases = [_counter(node) if base is _warning(node) else repeated.get(base, base) for base in _bases(node)]
        kwargs = {**kwargs, "_all_bases": bases}
    return node.target, freeze(args), freeze(kwargs)


def _local_repeats(graph: TrainGraph, classes: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Returns the repeats that this rank sees, if all-to-alls may repeat only those of their class."""
    returned = storages(*graph.graph.output_node().all_input_nodes)
    backward = backward_nodes(graph)
    first: dict[object, fx.Node] = {}
    repeated: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node in backward:
            continue
        key = _key(node, repeated)
        # What is returned must not share memory with another value; an all-to-all goes with its wait.
        memory = storages(node, *node.users) if node in classes else storages(node)
        if key is None or not memory.isdisjoint(returned):
            continue
        kept = first.setdefault((key, classes.get(node)), node)
        if kept is not node and can_unify_sizes(node, kept):
            repeated[node] = kept
    return repeated


def _plan(graph: TrainGraph) -> dict[fx.Node, fx.Node]:
    """Returns each node of the forward pass that repeats an earlier one, in order, with that one.

    An all-to-all repeats another if it does on every rank. Without those that some rank sees differ, a rank may see
    fewer, so they ask until nothing changes.
    """
    launches = graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    index = {node: number for number, node in enumerate(launches)}
    sequence = CollectiveSequence(graph)
    classes, all_different = [0] * len(launches), list(range(len(launches)))
    while True:
        repeated = _local_repeats(graph, dict(zip(launches, classes, strict=True)))
        if classes == all_different:
            return repeated
        agreed = sequence.agree(_question(classes), [index[repeated.get(node, node)] for node in launches])
        if agreed == classes:
            return repeated
        classes = agreed


def _question(classes: list[int]) -> Question[list[int], list[int]]:
    def contradiction(agreed: list[int], own: list[int]) -> str:
        if agreed != classes or not breaks_class(agreed, own):  # what differs may be known in the next round
            return ""
        return "compiled the joint graph again, and now all-to-alls differ that all ranks agreed to launch as one"

    return Question(DeduplicateLookups.name, f"repeats within {classes}", common_classes, contradiction)


@dataclass(frozen=True)
class DeduplicateLookups(GraphPass):
    """Looks up once what a forward pass looks up twice.

    A module that is called twice with the same features sends and looks them up twice. In a joint graph the forward
    pass does so once. In backward each call still updates the tables, in eager's order. What the pass changes::

          table = parameter('table')  # f32[9, 4]
          ids = value('ids')  # i64[4]
          sent = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
          received = wait(sent)  # i64[4]
          rows = aten.embedding(table, received)  # f32[4, 4]
        - sent_again = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
        - received_again = wait(sent_again)  # i64[4]
        - rows_again = aten.embedding(table, received_again)  # f32[4, 4]
        - scores = aten.mul(rows, rows_again)  # f32[4, 4]
        + scores = aten.mul(rows, rows)  # f32[4, 4]
          return scores  # scores

    It merges all nodes of the forward pass that compute the same; all-to-alls where every rank sees that they are the
    same (:mod:`graphpasses.agreement`). AOTAutograd's own elimination, by which each rank decides alone, is off.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again what it no longer sees as agreed.

    Example:
        >>> report = graphpasses.CompileReport()
        >>> compiled = graphpasses.compile(nn.Linear(4, 1), inner="aot_eager", report=report)
        >>> _ = compiled(torch.ones(2, 4))
        >>> report.by_graph["graph 0, joint"]["deduplicate-lookups"].num_rewrites
        0
    """

    name = "deduplicate-lookups"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.JOINT})
    runs_after = frozenset({"deduplicate-shared"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of nodes removed."""
        repeated = _plan(graph)
        for node, kept in repeated.items():
            unify_sizes(node, kept)
            graph.merge(node, kept)
        return len(repeated)
