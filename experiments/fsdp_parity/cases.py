"""What is trained, and which bucket orders must or must not give eager's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from experiments.fsdp_parity.orders import EXECUTION, NAMED, PER_MODULE
from experiments.harness.verdict import Comparison

__all__ = ["ALL_REDUCE_FIRST", "CASES", "COMPILED", "DEFAULT", "EAGER", "FSDP2", "NO_COALESCING", "Case"]

EAGER, FSDP2, DEFAULT, COMPILED = (
    "eager",
    "captured FSDP2 model",
    "captured SimpleFSDP model",
    "torch.compile",
)
NO_COALESCING, ALL_REDUCE_FIRST = "no coalescing", "all-reduce first"


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
        """Eager, both captured models, SimpleFSDP's under torch.compile where order matters, and the controls."""
        compiled = (COMPILED,) if self.reduce_dtype is torch.bfloat16 else ()
        return (EAGER, FSDP2, DEFAULT, *compiled, *self.controls)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every variant against eager."""
        return tuple(
            Comparison(variant, EAGER, "differ" if variant in self.controls else "equal")
            for variant in self.variants[1:]
        )


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
