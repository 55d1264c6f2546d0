"""What a step sends, and what it computes in between: the data behind a step's time on paper. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from graphpasses.errors import TopologyError


@dataclass(frozen=True)
class Transfer:
    """One collective."""

    # ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or ``"broadcast"``.
    collective: str
    num_bytes: int  # of the larger of what a rank reads and what it writes
    num_ranks: int  # of the process group
    stride: int = 0  # from each of its ranks to the next; 0 if they are not evenly spaced
    # Of FSDP's parameters in it: size of the sharded dim, bytes of one index of it. Each is padded to a
    # multiple of the ranks. Empty for all other collectives, whose bytes do not depend on the ranks.
    rows: tuple[tuple[int, int], ...] = ()

    def over(self, num_ranks: int) -> Transfer:
        """Returns the same over another number of ranks: FSDP's parameters are padded for them.

        Example:
            >>> Transfer("all_gather", 4096, 2, 1, rows=((1024, 4),)).over(1000).num_bytes
            8000
        """
        padded = sum(-(-size // num_ranks) * num_ranks * num_bytes for size, num_bytes in self.rows)
        return replace(self, num_ranks=num_ranks, num_bytes=padded or self.num_bytes)


@dataclass(frozen=True)
class Event:
    """What a rank does next."""

    kind: Literal["compute", "launch", "wait"]  # ``"compute"``; ``"launch"`` or ``"wait"`` of a transfer
    transfer: int = -1  # index of the transfer
    flops: int = 0  # floating-point operations of matrix products, convolutions and attention
    num_bytes: int = 0  # bytes that all other operators read and write


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step, and what it computes between them, in order."""

    num_ranks: int  # of the world
    transfers: tuple[Transfer, ...]  # in the order in which they are launched
    events: tuple[Event, ...]  # one launch and one wait of each, and what is computed in between

    def at(self, num_ranks: int) -> Traffic:
        """Returns the traffic of the same step on another number of ranks, each with the batch that it has now.

        Groups that reach over the whole world, such as FSDP's and those of HSDP's replicas, grow with it. Groups
        inside of it, of tensor parallelism or HSDP's shards, stay as they are, and must divide the ranks.

        Example:
            >>> shards, replicas = Transfer("reduce_scatter", 64, 4, 1), Transfer("all_reduce", 16, 2, 4)
            >>> [each.num_ranks for each in Traffic(8, (shards, replicas), ()).at(32).transfers]
            [4, 8]
        """
        return replace(self, transfers=tuple(self._at(each, num_ranks) for each in self.transfers))

    def _at(self, transfer: Transfer, num_ranks: int) -> Transfer:
        if not transfer.stride or transfer.stride * transfer.num_ranks != self.num_ranks:
            return transfer
        if num_ranks % transfer.stride:
            raise TopologyError(
                f"{num_ranks} ranks do not divide by the {transfer.stride} of each group inside of the world; "
                f"take multiples of {transfer.stride}"
            )
        return transfer.over(num_ranks // transfer.stride)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Traffic:
        """Reads back what ``dataclasses.asdict`` makes of it, as a run file stores it."""
        transfers = (
            Transfer(**{**each, "rows": tuple((size, num) for size, num in each["rows"])})
            for each in data["transfers"]
        )
        return cls(data["num_ranks"], tuple(transfers), tuple(Event(**each) for each in data["events"]))
