"""Tensors of sizes made by one operator each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from graphpasses.analysis.value_numbering import HeldNumbers, Received
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, argument
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = ["FuseSizeTensors"]

torch.library.define(
    "graphpasses::numbers",
    "(SymInt[] numbers, ScalarType dtype, Device device) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_NUMBERS = torch.ops.graphpasses.numbers.default


def _make_numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def _fake_numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(len(numbers), dtype=dtype, device=device)


# It has no tensor among its arguments, so its device does not choose the kernel.
torch.library.impl("graphpasses::numbers", "CompositeExplicitAutograd", _make_numbers)
torch.library.register_fake("graphpasses::numbers", _fake_numbers)


@dataclass(frozen=True)
class FuseSizeTensors(GraphPass):
    """Makes each tensor of sizes that is sent by one operator.

    ::

        all_to_all(view(stack([constant, stack([scalar_tensor(a), scalar_tensor(b)])], 1), [4]), …)
            ->   all_to_all(numbers([1, a, 1, b]), …)

    TorchRec sends splits and batch sizes for each module and sharding type, from a handful of small tensors for each.
    Behind ``bucket-all-to-all``, one operator makes what is sent for all of them.

    Example:
        >>> Pipeline((BucketAllToAll(), FuseSizeTensors())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "fuse-size-tensors"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"bucket-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of tensors replaced."""
        held = HeldNumbers(graph.module)
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
