"""Tensors of sizes, each made by one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphpasses.analysis.value_numbering import Received, SizeNumbering
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph, argument
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = ["FuseSizeTensors"]


@dataclass(frozen=True)
class FuseSizeTensors(GraphPass):
    """Makes with one operator each tensor of sizes that is sent.

    ::

        all_to_all(view(stack([constant, stack([scalar_tensor(a), scalar_tensor(b)])], 1), [4]), …)
            ->   all_to_all(size_tensor([1, a, 1, b]), …)

    TorchRec sends splits and batch sizes for each module and sharding type, and makes a handful of small tensors for
    each. After ``bucket-all-to-all`` one operator makes what is sent for all of them.

    Example:
        >>> Pipeline((BucketAllToAll(), FuseSizeTensors())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "fuse-size-tensors"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"bucket-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of tensors replaced."""
        sizes = SizeNumbering(graph.module)
        num_made = 0
        for launch in graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
            tensor = argument(launch)
            if tensor not in sizes or tensor.target == SIZE_TENSOR:
                continue
            numbers = sizes.numbers(tensor)
            if any(isinstance(number, Received) for number in numbers):
                continue
            value = tensor.meta["val"]
            with graph.graph.inserting_before(launch):
                made = graph.emit(SIZE_TENSOR, (numbers, value.dtype, value.device), like=tensor)
            launch.replace_input_with(tensor, made)
            num_made += 1
        return num_made
