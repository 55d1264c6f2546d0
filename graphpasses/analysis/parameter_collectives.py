"""Find in a graph how each parameter is unsharded and how each gradient is reduced.

Both are found from what the graph's inputs and outputs are, and from the ranks that a collective joins, never from
node names or positions: collectives of tensor parallelism, on parameters, activations or gradients, are none of
FSDP's. As traced from SimpleFSDP (torch.distributed.tensor._redistribute), with rank-dependent padding in brackets:

    unshard:  placeholder -> cast -> [pad] -> all_gather -> wait -> [slice] -> view -> compute
    reduce:   gradient -> cast -> [all_reduce -> wait] -> [split, pad, cat] -> reduce_scatter -> wait
              -> [slice] -> cast -> output
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from graphpasses._torch.gloo import ALL_GATHER
from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.effects import written_memory
from graphpasses.graph import WAIT, TrainGraph, argument, wait_of
from graphpasses.graph.nodes import SAME_TENSOR_OPS, reach, storages
from graphpasses.graph.parameters import ParameterInfo
from graphpasses.ops.reduce_in_tree import ALL_REDUCE_IN_TREE, REDUCE_SCATTER_IN_TREE, is_tree_op

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
REDUCE_SCATTERS = frozenset({REDUCE_SCATTER, REDUCE_SCATTER_IN_TREE})
ALL_REDUCES = frozenset({ALL_REDUCE, ALL_REDUCE_IN_TREE})
CAST = aten._to_copy.default
ADD_IN_PLACE = aten.add_.Tensor

# From a parameter's placeholder to its all-gather, as traced, and as packed by bucket-fsdp-collectives.
_BEFORE_ALL_GATHER = frozenset({CAST, aten.constant_pad_nd.default, aten.view.default})
_PACK_OPS = _BEFORE_ALL_GATHER | {aten.cat.default, aten.reshape.default, aten.view.dtype}
# An unshard copies a parameter's bytes: casts, padding, packing, the gather, and what undoes them.
_UNPACK_OPS = {aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes_copy.default, operator.getitem}
UNSHARD_OPS = _PACK_OPS | {ALL_GATHER, WAIT} | _UNPACK_OPS
# What stands between a reduction's wait and the gradient output.
AFTER_REDUCTION = frozenset({CAST, aten.slice.Tensor, aten.view.default, aten.reshape.default, *SAME_TENSOR_OPS})


@dataclass(frozen=True)
class Gather:
    """One all-gather of parameters, packed or not: ``chain`` leads from their placeholders to it, in order."""

    fqns: frozenset[str]
    chain: tuple[fx.Node, ...]

    @property
    def fqn(self) -> str:
        (fqn,) = self.fqns
        return fqn

    @property
    def all_gather(self) -> fx.Node:
        return self.chain[-1]

    @property
    def wait(self) -> fx.Node:
        """What yields all shards."""
        return wait_of(self.all_gather)


@dataclass(frozen=True)
class GradReduction:
    """How one gradient is reduced."""

    fqn: str  # canonical FQN of the parameter
    name: str  # the name of the output that it goes to; a tied parameter has several
    gradient: fx.Node  # this rank's whole gradient, before FSDP casts, pads or reduces it
    entry: fx.Node  # the node of the chain that reads ``gradient``
    reduce_scatter: fx.Node | None  # the reduce-scatter; None under HSDP whose groups of shards have one rank
    # HSDP's all-reduce, which the trace puts *before* the reduce-scatter; None without HSDP.
    all_reduce: fx.Node | None
    wait: fx.Node  # the wait of the reduce-scatter, else of the all-reduce
    tail: tuple[fx.Node, ...]  # the nodes after ``wait`` that undo padding and casts, in order

    @property
    def launch(self) -> fx.Node:
        return argument(self.wait)

    @property
    def reduced(self) -> fx.Node:
        """The last node of the chain: the sharded gradient."""
        return self.tail[-1] if self.tail else self.wait


def calls(value: Any, target: Any) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target == target


def collective_ranks(collective: fx.Node) -> tuple[int, ...]:
    """Returns the global ranks that a functional collective joins; its process group must be alive on this rank."""
    return named_group_ranks(str(collective.args[-1]))


def reduce_scatter_operator(op: str) -> Any:
    return REDUCE_SCATTER_IN_TREE if is_tree_op(op) else REDUCE_SCATTER


def all_reduce_operator(op: str) -> Any:
    return ALL_REDUCE_IN_TREE if is_tree_op(op) else ALL_REDUCE


def find_unshards(graph: TrainGraph) -> list[Gather]:
    """Returns every all-gather by which FSDP unshards one parameter, as traced, in the order of the graph."""
    return [
        gather
        for gather in find_gathers(graph)
        if len(gather.fqns) == 1 and _BEFORE_ALL_GATHER.issuperset(node.target for node in gather.chain[:-1])
    ]


def find_gathers(graph: TrainGraph) -> list[Gather]:
    """Returns every all-gather by which FSDP unshards parameters, one or several, in the order of the graph."""
    fqn_of = {placeholder: fqn for fqn, placeholder in graph.parameter_placeholders()}
    launches = graph.graph.find_nodes(op="call_function", target=ALL_GATHER)
    return [
        gather
        for launch in launches
        if (gather := _gather(launch, fqn_of)) is not None
        and {collective_ranks(gather.all_gather)} == {graph.parameters[fqn].shard_ranks for fqn in gather.fqns}
    ]


def movable(graph: TrainGraph, gathers: Iterable[Gather]) -> list[Gather]:
    """Returns those that bring the same whenever they are launched: no call writes what they send."""
    written = written_memory(graph.graph)
    return [
        each
        for each in gathers
        if written.isdisjoint(storages(*(read for node in each.chain for read in node.all_input_nodes)))
    ]


def _gather(all_gather: fx.Node, fqn_of: Mapping[fx.Node, str]) -> Gather | None:
    """Returns the chain that leads to an all-gather; None if it gathers anything else than parameters."""

    def packs(node: fx.Node) -> bool:
        return node is all_gather or node.target in _PACK_OPS

    found = reach([all_gather], lambda node: node.all_input_nodes if packs(node) else ())
    chain = found - fqn_of.keys()
    if not all(map(packs, chain)):
        return None
    return Gather(frozenset(fqn_of[node] for node in found - chain), tuple(sorted(chain)))


def gradient_summands(value: fx.Node) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yields the summands of a gradient output, leftmost first, each with what only undoes its casts and padding."""
    pending = [value]
    while pending:
        source = pending.pop()
        tail: list[fx.Node] = []
        while source.target in AFTER_REDUCTION:
            tail.insert(0, source)
            source = argument(source)
        if is_add(source) and SAME_TENSOR_OPS.issuperset(node.target for node in tail):
            pending += reversed(source.all_input_nodes)
        else:
            yield source, tuple(tail)


def is_add(node: fx.Node) -> bool:
    """Whether ``node`` is a plain sum of two nodes, or one in place that no other reader can tell from it."""
    if len(node.all_input_nodes) != 2 or node.kwargs:
        return False
    return node.target == aten.add.Tensor or (node.target == ADD_IN_PLACE and _is_alone(argument(node)))


def added_uses(gradient: fx.Node) -> list[fx.Node]:
    """Returns the gradients of the uses of one tensor that autograd's engine has added up, in order of arrival.

    The engine's sum has a sequence number (``seq_nr``) that neither summand has, unlike a sum in a backward formula.
    """
    # Of sums of the engine, and views of such, what they add; chains may be longer than Python's stack.
    summed: dict[fx.Node, list[_Operand]] = {}
    pending = [gradient]
    while pending:
        node = pending[-1]
        operands = _operands(node)
        if missing := [each for each, is_opened in operands if is_opened and each not in summed]:
            pending += missing
            continue
        apart = [each for each, is_opened in operands if not (is_opened and summed[each])]
        numbers = [each.meta.get("seq_nr") for each in apart]
        is_view = node.target == aten.view.default
        is_engines = not apart if is_view else node.meta.get("seq_nr") not in (None, *numbers) and None not in numbers
        summed[pending.pop()] = operands if is_engines else []
    uses, parts = [], [(gradient, True)]
    while parts:
        node, is_opened = parts.pop()
        if is_opened and summed[node]:
            parts += reversed(summed[node])
        else:
            uses.append(node)
    return uses


_Operand = tuple[fx.Node, bool]
"""What a sum, or a view, is made of, and whether that may be a sum of the engine: nothing else reads it."""


def _operands(node: fx.Node) -> list[_Operand]:
    if calls(node, aten.view.default):
        source = argument(node)
        return [(source, True)] if source.meta["val"].shape == node.meta["val"].shape else []
    summands = [each for each in node.args[:2] if isinstance(each, fx.Node)]
    is_sum = node.target == aten.add.Tensor and not node.kwargs and len(summands) == 2
    return [(each, len(each.users) == 1) for each in summands] if is_sum and all(map(is_backward, summands)) else []


def _is_alone(node: fx.Node) -> bool:
    """Whether the memory of ``node`` was made by the graph and has one reader."""
    while len(node.users) == 1:
        if node.target not in {*SAME_TENSOR_OPS, ADD_IN_PLACE, aten.view.default}:
            return node.target in (WAIT, CAST, aten.add.Tensor)
        node = argument(node)
    return False


def readers_inside(value: fx.Node) -> list[fx.Node]:
    """Returns what in the step itself reads a gradient output, or a reduced summand of it."""
    nodes = reach(
        [value], lambda node: node.all_input_nodes if node.target in AFTER_REDUCTION or is_add(node) else ()
    )
    return sorted({user for node in nodes for user in node.users if user.op != "output"} - nodes)


def find_grad_reductions(graph: TrainGraph) -> dict[str, list[GradReduction]]:
    """Returns each gradient's reductions, by canonical FQN, in output order and that of autograd's adds."""
    found: dict[str, list[GradReduction]] = {}
    for fqn, gradients in graph.gradients().items():
        info = graph.parameters[fqn]
        for slot, gradient in gradients.items():
            for source, tail in gradient_summands(gradient):
                is_scattered = is_result_of(source, REDUCE_SCATTERS, info.shard_ranks)
                is_whole = len(info.shard_ranks) == 1 and is_result_of(source, ALL_REDUCES, info.replicate_ranks)
                if is_scattered or is_whole:
                    found.setdefault(fqn, []).append(_reduction(info, graph.outputs[slot].fqn, source, tail))
    return found


def is_result_of(value: Any, targets: Set[Any], ranks: tuple[int, ...]) -> TypeGuard[fx.Node]:
    """Whether ``value`` is the wait of a collective of this kind over these ranks, in this order."""
    if not calls(value, WAIT):
        return False
    launch = argument(value)
    return launch.target in targets and collective_ranks(launch) == ranks


def _reduction(info: ParameterInfo, name: str, wait: fx.Node, tail: tuple[fx.Node, ...]) -> GradReduction:
    reduce_scatter, all_reduce, gradient = None, None, wait
    if is_result_of(gradient, REDUCE_SCATTERS, info.shard_ranks):
        reduce_scatter = argument(gradient)
        gradient, entry = before_padding(reduce_scatter)
    if is_result_of(gradient, ALL_REDUCES, info.replicate_ranks):
        all_reduce = argument(gradient)
        gradient, entry = before_padding(all_reduce)
    if gradient.target == CAST and set(gradient.kwargs) == {"dtype"}:
        gradient, entry = argument(gradient), gradient
    return GradReduction(info.fqn, name, gradient, entry, reduce_scatter, all_reduce, wait, tail)


def before_padding(collective: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undoes ``cat([split(x)[0], …, pad(split(x)[-1])])``, which brings ``x`` into (rank, shard) order.

    Returns ``(x, its reader)``; where there is no such padding, the collective's input and the collective.
    """
    value = argument(collective)
    if value.target != aten.cat.default or len(value.args) != 1:
        return value, collective
    splits: set[fx.Node] = set()
    parts = value.args[0]
    assert isinstance(parts, (list, tuple))
    for index, part in enumerate(parts):
        if calls(part, aten.constant_pad_nd.default):
            part = part.args[0]
        if calls(part, aten.new_zeros.default) and part.meta["val"].numel() == 0:
            continue  # a rank whose shard is all padding
        if calls(part, operator.getitem) and calls(part.args[0], aten.split.Tensor) and part.args[1] == index:
            splits.add(part.args[0])
        else:
            return value, collective
    if len(splits) != 1:
        return value, collective
    split = splits.pop()
    return argument(split), split
