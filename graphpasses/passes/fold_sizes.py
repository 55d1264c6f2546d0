"""Tensors of sizes made by one operator each, and equal sizes that the ranks exchange read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from graphpasses._torch.effects import collective_group
from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.symbols import can_name_alike, expression, name_alike
from graphpasses.collectives.launches import Launches
from graphpasses.collectives.numbers import HeldNumbers, Received
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, argument
from graphpasses.pipeline import GraphPass, Numerics

__all__ = ["FoldSizes"]

torch.library.define(
    "graphpasses::numbers",
    "(SymInt[] numbers, ScalarType dtype, Device device) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_NUMBERS = torch.ops.graphpasses.numbers.default
_READ = torch.ops.aten._local_scalar_dense.default


def _make_numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def _fake_numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(len(numbers), dtype=dtype, device=device)


# It has no tensor among its arguments, so its device does not choose the kernel.
torch.library.impl("graphpasses::numbers", "CompositeExplicitAutograd", _make_numbers)
torch.library.register_fake("graphpasses::numbers", _fake_numbers)


@dataclass(frozen=True)
class FoldSizes(GraphPass):
    """Makes each tensor of sizes that is sent by one operator, and reads equal received sizes once.

    ::

        all_to_all(view(stack([constant, stack([scalar_tensor(a), scalar_tensor(b)])], 1), [4]), …)
            ->   all_to_all(numbers([1, a, 1, b]), …)

    TorchRec sends splits and batch sizes for each module and sharding type. Where every rank sends equal numbers for
    two of them, as the batch sizes of one batch are, what is received is equal too, and later passes know it.

    All ranks must compile the same model, at the same time: they exchange which of the numbers that they send are
    equal, once per model and list of collectives (see :func:`~graphpasses.collectives.agreement.agree`).

    Example:
        >>> Pipeline((FoldSizes(), BucketAllToAll())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "fold-sizes"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"deduplicate-shared"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of sizes and tensors replaced."""
        held = HeldNumbers(graph.module)
        return _read_once(graph, Launches(graph), held) + _make_at_once(graph, held)


def _read_once(graph: TrainGraph, launches: Launches, held: HeldNumbers) -> int:
    """Reads received numbers of equal value once; returns how many reads it replaced."""
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
                    "Disable 'fold-sizes' for this model"
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


def _make_at_once(graph: TrainGraph, held: HeldNumbers) -> int:
    """Makes the tensors of sizes that are sent by one operator each; returns how many."""
    num_made = 0
    for launch in graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
        tensor = argument(launch)
        if tensor not in held or tensor.target == _NUMBERS:
            continue
        numbers = held.numbers(tensor)
        if any(isinstance(number, Received) for number in numbers):
            continue
        value = tensor.meta["val"]
        with graph.graph.inserting_before(launch):
            made = graph.emit(_NUMBERS, (numbers, value.dtype, value.device), like=tensor)
        launch.replace_input_with(tensor, made)
        num_made += 1
    return num_made
