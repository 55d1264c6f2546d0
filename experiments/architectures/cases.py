"""The rows of the table: every architecture, reduced in two dtypes, and the controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiments.architectures.architecture import Architecture
from experiments.architectures.zoo import ARCHITECTURES
from experiments.harness.verdict import Comparison

__all__ = [
    "CASES",
    "EAGER",
    "EAGER_ITSELF",
    "GRAPH",
    "GROUPING",
    "NO_COALESCING",
    "ORDER",
    "SIMPLE_FSDP",
    "Case",
    "cases",
]

EAGER, GRAPH = "eager FSDP2", "graph"
EAGER_ITSELF = "eager: "
"""So begins what eager refuses; else graphpasses does."""
SIMPLE_FSDP = "graph of SimpleFSDP"
ORDER, GROUPING, NO_COALESCING = "order of parameters", "one group", "no coalescing"

_CONTROLS = {
    "llama": (ORDER, GROUPING),
    "llama, tied": (NO_COALESCING,),
    "granitemoe": (ORDER,),
    "rwkv": (ORDER,),
    "bert, dropout": (ORDER, GROUPING),
    "albert, one layer three times": (NO_COALESCING,),
    "marian, dropout": (ORDER, GROUPING),
    "vit": (ORDER, GROUPING),
    "siglip": (ORDER, GROUPING),
    "whisper": (ORDER, GROUPING),
}
"""The controls of each family, at one of its models. Sums in fp32 are exact here, so they have none."""


@dataclass(frozen=True)
class Case:
    """One architecture, its gradients reduced in one dtype.

    Args:
        architecture: what is trained.
        reduce_dtype: of the reductions; parameters and compute are in bf16.
    """

    architecture: Architecture
    reduce_dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = "bf16" if self.reduce_dtype is torch.bfloat16 else "fp32"
        return f"{self.architecture.name}, {dtype}"

    @property
    def controls(self) -> tuple[str, ...]:
        """The ways of training a graph that must differ from eager."""
        return _CONTROLS.get(self.architecture.name, ()) if self.reduce_dtype is torch.bfloat16 else ()

    @property
    def graphs(self) -> tuple[str, ...]:
        """The ways that must be equal: beside a control of SimpleFSDP's passes, SimpleFSDP with them."""
        return (GRAPH, SIMPLE_FSDP) if NO_COALESCING in self.controls else (GRAPH,)

    @property
    def variants(self) -> tuple[str, ...]:
        """Eager, its graphs and the controls; eager alone where it cannot train the model."""
        if self.architecture.refused.startswith(EAGER_ITSELF):
            return (EAGER,)
        return (EAGER, *self.graphs, *self.controls)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every graph against eager."""
        equal = (Comparison(graph, EAGER, "equal") for graph in self.graphs)
        return (*equal, *(Comparison(control, EAGER, "differ") for control in self.controls))

    @property
    def topology(self) -> dict[str, Any]:
        return {"num_ranks": 4, "gpus_per_node": 2, "mode": "rail"}


def cases(architectures: Sequence[Architecture]) -> tuple[Case, ...]:
    """Returns the rows of some architectures."""
    return tuple(Case(each, dtype) for each in architectures for dtype in (torch.bfloat16, torch.float32))


CASES = cases(ARCHITECTURES)
