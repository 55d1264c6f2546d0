"""What the training of a variant says besides its run file."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Calls", "Facts"]


@dataclass(frozen=True)
class Calls:
    """What one step issued on one rank, forward and backward.

    Args:
        collectives: those that reached a process group.
        lookups: calls of FBGEMM's table-batched kernels (TBE).
        all_reduces: the collectives that are all-reduces, as DistributedDataParallel's of dense gradients are.
    """

    collectives: tuple[int, int]
    lookups: tuple[int, int]
    all_reduces: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """What the table says of a run besides its bits.

    Args:
        num_graphs: graphs that Dynamo made, recompilations included; 0 where nothing is compiled.
        calls: those of rank 0 in the last step; None if a step failed.
        num_unproved: values of the graphs of all ranks that are not proved to be what they were before the passes.
    """

    num_graphs: int
    calls: Calls | None
    num_unproved: int = 0
