"""Bucket plans that pack in another order than eager FSDP2: the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import nn

from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan

__all__ = ["EXECUTION", "NAMED", "PER_MODULE", "reorder", "wrong_order"]

PER_MODULE, NAMED, EXECUTION = "per-module order", "named_parameters order", "execution order"


def reorder(plan: BucketPlan, key: Callable[[str], object]) -> BucketPlan:
    """Returns ``plan`` with the parameters of every entry sorted by ``key``; buckets stay what they are.

    Example:
        >>> reorder(BucketPlan.from_parameters([["b", "a"]]), str).entries[0].fqns
        ('a', 'b')
    """
    entries = (replace(entry, fqns=tuple(sorted(entry.fqns, key=key))) for entry in plan.entries)
    return replace(plan, entries=tuple(entries))


def wrong_order(variant: str, plan: BucketPlan, model: nn.Module, captured: Layout) -> BucketPlan:
    """Returns the plan of a control that packs in another order than eager.

    Args:
        variant: which control.
        plan: eager's plan.
        model: the captured model.
        captured: layout of the unbucketed step, which is in execution order.
    """
    execution = _positions(entry.fqn for bucket in captured.buckets for entry in bucket.entries)
    last = len(execution)
    if variant == EXECUTION:
        return reorder(plan, lambda fqn: execution.get(fqn, last))
    if variant == NAMED:
        named = _positions(fqn for fqn, _ in model.named_parameters())
        return reorder(plan, named.__getitem__)
    modules = _positions(_module(fqn) for entry in plan.entries for fqn in entry.fqns)
    return reorder(plan, lambda fqn: (modules[_module(fqn)], execution.get(fqn, last)))


def _module(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _positions(names: Iterable[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}
