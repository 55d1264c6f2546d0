"""Equal sizes that the ranks exchange, read once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.symbols import can_name_alike, expression, name_alike
from graphpasses.analysis.effects import collective_group
from graphpasses.analysis.value_numbering import HeldNumbers, Received
from graphpasses.collective_sequence import Launches
from graphpasses.errors import AgreementError
from graphpasses.graph import Stage, TrainGraph, argument
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = ["DeduplicateSizes"]

_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class DeduplicateSizes(GraphPass):
    """Reads once what all ranks send more than once: sizes that are equal because they are one size.

    TorchRec sends splits and batch sizes for each module and sharding type, and reads those that it receives. Where
    every rank sends one size twice, as the batch size of one batch for two modules, what is received is equal, too;
    what a rank receives from itself it knows. Later passes see it in the shapes.

    All ranks must compile the same model, at the same time: they exchange which of the sizes they send are equal,
    once per model and list of collectives (see :func:`~graphpasses.agreement.agree`). Constants are not
    among them: another compilation, for batches of another size, may have others.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again and sends sizes that differ now.

    Example:
        >>> Pipeline((DeduplicateSizes(), BucketAllToAll())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "deduplicate-sizes"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"deduplicate-shared"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of reads replaced."""
        launches, held = Launches(graph), HeldNumbers(graph.module)
        sent = {launch: _chunks(launch, held) for launch in launches.all_to_alls}
        if not any(sent.values()):
            return 0
        everyone = {
            group: launches.agree("equal numbers", list(sent.values()), group) for group in launches.groups
        }
        _check_own(sent, everyone)
        number_of = {launch: index for index, launch in enumerate(sent)}
        # A rank receives from itself what it sent.
        first: dict[object, fx.Node] = {
            (group, named_group(str(group)).rank(), number): size
            for group in launches.groups
            for number, size in enumerate(held.all_numbers)
            if isinstance(size, fx.Node)
        }
        num_replaced = 0
        for node in graph.graph.find_nodes(op="call_function", target=_READ):
            received = held.numbers(argument(node))[0] if argument(node) in held else None
            if not isinstance(received, Received):
                continue
            group = collective_group(received.launch)
            chunks = everyone[group][received.source][number_of[received.launch]]
            own = named_group(str(group)).rank()
            number = chunks[own][received.index]
            same = first.setdefault((group, received.source, number), node) if number >= 0 else node
            if same is node or not can_name_alike(node, same):
                continue
            # One of them may be known to be a number, of which the graph made use.
            name_alike(*((same, node) if _is_number(node) else (node, same)))
            if expression(node.meta["val"]) == expression(same.meta["val"]):
                node.replace_all_uses_with(same)
                graph.graph.erase_node(node)
                num_replaced += 1
        return num_replaced


def _check_own(
    sent: dict[fx.Node, list[list[int]]], everyone: dict[object, list[list[list[list[int]]]]]
) -> None:
    # Only after a later compilation with the same collectives, about which the ranks do not talk again.
    now: dict[int, int] = {}
    for index, (launch, chunks) in enumerate(sent.items()):
        group = collective_group(launch)
        told = everyone[group][named_group(str(group)).rank()][index]
        for old, new in zip(chain.from_iterable(told), chain.from_iterable(chunks), strict=True):
            if old >= 0 and now.setdefault(old, new) != new:
                raise AgreementError(
                    f"rank {dist.get_rank()} compiled the model again, and now sends two sizes that differ where it "
                    "told the other ranks that they are equal, as the sizes of two batches may have been by chance. "
                    "Disable 'deduplicate-sizes' for this model"
                )


def _is_number(size: fx.Node) -> bool:
    return not free_symbols(size.meta["val"])


def _chunks(launch: fx.Node, held: HeldNumbers) -> list[list[int]]:
    """Returns the ids of the sizes that this rank sends to each rank; nothing if it does not know them.

    Constants have none (-1): another compilation, for batches of another size, may have others.
    """
    if launch not in held:
        return []
    splits: Any = launch.args[2]
    tensor = argument(launch)
    ids = [
        -1 if isinstance(number, int) else own
        for number, own in zip(held.numbers(tensor), held.ids(tensor), strict=True)
    ]
    ends = list(accumulate(splits, initial=0))
    return [ids[start:end] for start, end in pairwise(ends)]
