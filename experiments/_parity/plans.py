"""Bucket plans that pack in another order than eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphpasses.fsdp.plan import BucketPlan

__all__ = ["reorder"]


def reorder(plan: BucketPlan, key: Callable[[str], object]) -> BucketPlan:
    """Returns ``plan`` with the parameters of every entry sorted by ``key``; buckets stay what they are."""
    entries = (replace(entry, fqns=tuple(sorted(entry.fqns, key=key))) for entry in plan.entries)  # type: ignore[type-var,arg-type]
    return replace(plan, entries=tuple(entries))
