"""What is trained, and which bucket orders must or must not give eager's bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from experiments._parity.plans import reorder
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan

DEFAULT, COMPILED = "default pipeline", "torch.compile"


@dataclass(frozen=True)
class Case:
    """One model trained one way: mesh, reduction dtype and op, and the variants of the captured step.

    ``avg`` is FSDP2's default; ``sum`` is what torchtitan asks of FSDP2 (divide factor 1, forced sum).
    """

    model: str
    mesh: Literal["fsdp", "hsdp"]
    reduce_dtype: torch.dtype
    op: Literal["avg", "sum"]
    controls: tuple[str, ...]

    @property
    def name(self) -> str:
        dtype = "bf16" if self.reduce_dtype is torch.bfloat16 else "fp32"
        return f"{self.model}-{self.mesh}-{dtype}"

    @property
    def variants(self) -> tuple[str, ...]:
        """What is trained beside eager: the default pipeline, by both doors where order matters, and the controls."""
        compiled = (COMPILED,) if self.reduce_dtype is torch.bfloat16 else ()
        return (DEFAULT, *compiled, *self.controls)


PER_MODULE, NAMED, EXECUTION = "per-module order", "named_parameters order", "execution order"
NO_COALESCING, ALL_REDUCE_FIRST = "no coalescing", "all-reduce first"

_CONTROLS = {
    "llama": (EXECUTION,),
    "gpt": (PER_MODULE, EXECUTION, NO_COALESCING),
    "reordered": (PER_MODULE, EXECUTION),
    "nested": (PER_MODULE, NAMED, EXECUTION),
    "reused": (EXECUTION, NO_COALESCING),
    "frozen": (EXECUTION,),
    "uneven": (PER_MODULE, NAMED, EXECUTION),
}
_DTYPES = (torch.bfloat16, torch.float32)


def _that_matter(controls: tuple[str, ...], reduce_dtype: torch.dtype) -> tuple[str, ...]:
    """Leaves out what cannot change a bit: fp32 adds the bf16 gradients of 4 ranks exactly, in any order.

    (An exact sum needs 24 bits; bf16 has 8, so only exponents that lie 14 or more apart would round.)
    """
    return controls if reduce_dtype is torch.bfloat16 else tuple(c for c in controls if c == NO_COALESCING)


CASES = tuple(
    Case(model, "fsdp", dtype, "avg", _that_matter(controls, dtype))
    for model, controls in _CONTROLS.items()
    for dtype in _DTYPES
) + tuple(
    # Two ranks add in one order only, so inside HSDP's 2-rank groups no bucket order can matter.
    Case(model, "hsdp", dtype, "sum", _that_matter((ALL_REDUCE_FIRST, *coalescing), dtype))
    for model, coalescing in (("llama", ()), ("gpt", (NO_COALESCING,)), ("uneven", ()))
    for dtype in _DTYPES
)


def wrong_plan(variant: str, plan: BucketPlan, model: nn.Module, captured: Layout) -> BucketPlan:
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


def _positions(names: object) -> dict[str, int]:
    unique: Sequence[str] = list(dict.fromkeys(names))  # type: ignore[call-overload]
    return {name: index for index, name in enumerate(unique)}
