"""Equal sizes that the ranks exchange, read once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.symbols import can_unify_sizes, unify_sizes
from graphpasses.agreement import CollectiveSequence, Question
from graphpasses.analysis.value_numbering import Received, SizeNumbering
from graphpasses.graph import Stage, TrainGraph, argument
from graphpasses.graph.nodes import collective_group
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.passes.runner import GraphPass, Numerics

_READ = torch.ops.aten._local_scalar_dense.default

Sent = list[list[list[int]]]  # per all-to-all, per rank: the ids of the sizes that it gets


def _sent(launch: fx.Node, sizes: SizeNumbering) -> list[list[int]]:
    """Returns the ids of the sizes that this rank sends to each rank; nothing if it does not know them.

    Those of constants are negative, and not compared between ranks: batches of another size may have other constants.
    """
    if launch not in sizes:
        return []
    splits: Any = launch.args[2]
    tensor = argument(launch)
    ids = [
        -1 - own if isinstance(number, int) else own
        for number, own in zip(sizes.numbers(tensor), sizes.ids(tensor), strict=True)
    ]
    ends = list(accumulate(splits, initial=0))
    return [ids[start:end] for start, end in pairwise(ends)]


def _question(rank: int, num_ranks: int) -> Question[Sent, list[Sent]]:
    """Asks what every rank sends; in a fake process group, where none answers, each sends what this one does."""

    def combine(known: list[Sent]) -> list[Sent]:
        return known * (num_ranks // len(known))

    def contradiction(everyone: list[Sent], own: Sent) -> str:
        now: dict[int, int] = {}
        for old, new in zip(_flat(everyone[rank]), _flat(own), strict=True):
            if old >= 0 and now.setdefault(old, new) != new:
                return (
                    "compiled the model again, and now sends two sizes that differ where it told the other ranks "
                    "that they are equal, as the sizes of two batches may have been by chance"
                )
        return ""

    return Question(DeduplicateSizes.name, "equal numbers", combine, contradiction)


def _flat(sent: Sent) -> list[int]:
    return [*chain.from_iterable(chain.from_iterable(sent))]


@dataclass(frozen=True)
class DeduplicateSizes(GraphPass):
    """Reads once what all ranks send more than once: sizes that are equal because they are one size.

    TorchRec sends splits and batch sizes for each module and sharding type. Where every rank sends one size twice, as
    the batch size of one batch for two modules, what is received is equal, too; and a rank knows what it receives
    from itself. Later passes see it in the shapes.

    What the pass changes where every rank sends the same sizes::

          input_0 = batch('input 0')  # f32[s75]
          sym_size = aten.sym_size.int(input_0, 0)  # s75
          scalar_tensor = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
          scalar_tensor_1 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
          stack = aten.stack([scalar_tensor, scalar_tensor_1])  # i64[2]
          exchanged = all_to_all(stack, [1, 1], [1, 1], group0)  # i64[2]
          waited = wait(exchanged)  # i64[2]
          select = aten.select.int(waited, 0, 1)  # i64[]
          local_scalar_dense = aten._local_scalar_dense(select)  # u0
          new_zeros = aten.new_zeros(input_0, [local_scalar_dense], pin_memory=False)  # f32[u0]
          scalar_tensor_2 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
          scalar_tensor_3 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
          stack_1 = aten.stack([scalar_tensor_2, scalar_tensor_3])  # i64[2]
          exchanged_1 = all_to_all(stack_1, [1, 1], [1, 1], group0)  # i64[2]
          waited_1 = wait(exchanged_1)  # i64[2]
        - select_1 = aten.select.int(waited_1, 0, 1)  # i64[]
        - local_scalar_dense_1 = aten._local_scalar_dense(select_1)  # u1
        - new_zeros_1 = aten.new_zeros(input_0, [local_scalar_dense_1], pin_memory=False)  # f32[u1]
        + new_zeros_1 = aten.new_zeros(input_0, [local_scalar_dense], pin_memory=False)  # f32[u0]
          return new_zeros, new_zeros_1  # output 0, output 1

    All ranks must compile the same model, at the same time: they exchange which of the sizes that they send are
    equal, see :mod:`graphpasses.agreement`. Constants, which another compilation may have otherwise, are not among
    them. In a fake process group every rank is taken to send what this one does.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again and sends sizes that differ now.

    Example:
        >>> graphpasses.recommender_pipeline(disable=["deduplicate-sizes"]).disable
        ['deduplicate-sizes']
    """

    name = "deduplicate-sizes"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"deduplicate-lookups"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of reads replaced."""
        sequence, sizes = CollectiveSequence(graph), SizeNumbering(graph.module)
        sent = {launch: _sent(launch, sizes) for launch in sequence.all_to_alls}
        if not any(sent.values()):
            return 0
        groups = {group: named_group(str(group)) for group in sequence.groups}
        rank_in = {group: ranks.rank() for group, ranks in groups.items()}
        everyone = {
            group: sequence.agree(_question(ranks.rank(), ranks.size()), [*sent.values()], [group])
            for group, ranks in groups.items()
        }
        number_of = {launch: index for index, launch in enumerate(sent)}
        # A rank receives from itself what it sent.
        first: dict[object, fx.Node] = {
            (group, rank, number): size
            for group, rank in rank_in.items()
            for number, size in enumerate(sizes.all_numbers)
            if isinstance(size, fx.Node)
        }
        replaced: dict[fx.Node, fx.Node] = {}  # a size that was received may be sent on
        for node in graph.graph.find_nodes(op="call_function", target=_READ):
            received = sizes.numbers(argument(node))[0] if argument(node) in sizes else None
            if not isinstance(received, Received):
                continue
            group = collective_group(received.launch)
            chunks = everyone[group][received.source][number_of[received.launch]]
            number = chunks[rank_in[group]][received.index]
            same = first.setdefault((group, received.source, number), node) if number >= 0 else node
            same = replaced.get(same, same)
            if same is node or not can_unify_sizes(node, same):
                continue
            # One of them may be known to be a number, of which the graph made use.
            is_number = not free_symbols(node.meta["val"])
            unify_sizes(*((same, node) if is_number else (node, same)))
            if size_expression(node) == size_expression(same):
                node.replace_all_uses_with(same)
                graph.graph.erase_node(node)
                replaced[node] = same
        return len(replaced)
