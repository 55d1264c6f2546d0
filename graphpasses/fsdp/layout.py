"""Bucket layouts as data: which parameter's gradient sits at which byte of which reduction.

Only reductions have a layout worth comparing: an element's byte offset decides its NCCL ring, hence the
order in which the ranks' contributions are added, hence its bits. An all-gather is a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BucketLayout", "Layout", "LayoutEntry"]


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter's place in a bucket.

    Args:
        fqn: canonical (first-seen) FQN of the parameter.
        numel: elements of the whole, unpadded parameter.
        padded_numel: elements that it takes in one rank's part of the bucket, padding included.
        offset: bytes from the start of one rank's part to its first element.
    """

    fqn: str
    numel: int
    padded_numel: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """One reduction: its process group, its arithmetic and its entries, in byte order.

    Args:
        collective: ``"reduce_scatter"`` or ``"all_reduce"`` (HSDP's second step).
        ranks: global ranks of the process group, in group order.
        op: ``"avg"`` or ``"sum"``.
        dtype: dtype of the elements on the wire, e.g. ``"bfloat16"``.
        entries: the parameters, in byte order.
    """

    collective: Literal["reduce_scatter", "all_reduce"]
    ranks: tuple[int, ...]
    op: str
    dtype: str
    entries: tuple[LayoutEntry, ...]


@dataclass(frozen=True)
class Layout:
    """The layouts of all reductions of a training step."""

    buckets: tuple[BucketLayout, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, as a run file stores them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Reads back what :meth:`to_json` wrote."""
        return cls(
            tuple(
                BucketLayout(
                    collective=bucket["collective"],
                    ranks=tuple(bucket["ranks"]),
                    op=bucket["op"],
                    dtype=bucket["dtype"],
                    entries=tuple(LayoutEntry(**entry) for entry in bucket["entries"]),
                )
                for bucket in data["buckets"]
            )
        )
