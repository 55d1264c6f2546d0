"""What is trained on which clusters, and which runs must have the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from experiments.any_cluster.models import decoder, llama
from experiments.harness.verdict import Comparison
from graphpasses.integrations.torchtitan.cpu_configs import Recipe

__all__ = ["CASES", "NUM_MICROBATCHES", "PARITY", "SHORT", "Case", "Cluster"]

_ALLOW = ("ranks", "topology")
NUM_MICROBATCHES = 8  # of the global batch
_Added = Literal["in a tree", "by FSDP2", "microbatches one by one", "rank-major", "dropout by rank"]


@dataclass(frozen=True)
class Cluster:
    """A run on some ranks.

    Args:
        name: what the table calls it.
        shape: of the mesh; two numbers are HSDP's replicas and shards.
        captured: whether captured steps run.
        experts: torchtitan's expert-parallel degree.
        added: how gradients are; all but ``"in a tree"`` are controls. ``"microbatches one by one"`` adds ranks in a
            tree; ``"rank-major"`` microbatches, too, of which each rank has consecutive ones; ``"dropout by rank"``
            draws random numbers as they come.
        start: which third of the steps it begins with: it goes on from what the run with the one before wrote.
        ends: after how many thirds.
    """

    name: str
    shape: tuple[int, ...]
    captured: bool = False
    experts: int = 1
    added: _Added = "in a tree"
    start: int = 0
    ends: int = 3

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def mesh(self) -> tuple[tuple[int, ...], int]:
        """Its shape, and the expert-parallel degree."""
        return self.shape, self.experts

    def steps(self, num_steps: int) -> range:
        """Which of ``num_steps`` it runs."""
        thirds = [num_steps * third // 3 for third in range(4)]
        return range(thirds[self.start], thirds[self.ends])


@dataclass(frozen=True)
class Case:
    """One model, on several clusters.

    Args:
        name: what the table calls it.
        build: makes the model, from torch's seed; a recipe is trained by torchtitan's trainers.
        accumulate: see :func:`graphpasses.canonical_reductions`.
        clusters: all are compared with the first.
        controls: pairs of runs that must differ.
        any_expert_degree: see ``canonical_trainer``.
        num_steps: of a whole run.
        num_ranks: of the only runs that are trained; None trains all.
        mesh: shape and expert-parallel degree of the only runs that are trained; None trains all.
    """

    name: str
    build: Callable[[], nn.Module] | Recipe
    accumulate: torch.dtype | None
    clusters: tuple[Cluster, ...]
    controls: tuple[tuple[Cluster, Cluster], ...] = ()
    any_expert_degree: bool = False
    num_steps: int = 25
    num_ranks: int | None = None
    mesh: tuple[tuple[int, ...], int] | None = None

    @property
    def runs(self) -> tuple[Cluster, ...]:
        """What is trained, controls last."""
        runs = dict.fromkeys((*self.clusters, *(each for pair in self.controls for each in pair)))
        return tuple(
            each for each in runs if self.num_ranks in (None, each.num_ranks) and self.mesh in (None, each.mesh)
        )

    @property
    def variants(self) -> tuple[str, ...]:
        """See :class:`experiments.harness.parity.Case`."""
        return tuple(each.name for each in self.runs)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """See :class:`experiments.harness.parity.Case`."""
        rows = [
            Comparison(
                each.name,
                self.clusters[0].name,
                "equal",
                num_skipped=self.num_steps - len(each.steps(self.num_steps)),
                allow=_ALLOW,
            )
            for each in self.clusters[1:]
        ]
        rows += [Comparison(b.name, a.name, "differ", allow=_ALLOW) for a, b in self.controls]
        return tuple(rows)

    @property
    def is_titan(self) -> bool:
        """Whether torchtitan's trainers train it."""
        return isinstance(self.build, Recipe)

    def on(self, num_ranks: int, mesh: tuple[tuple[int, ...], int] | None = None) -> Case:
        """Returns the case with the runs on so many ranks alone, and on this mesh."""
        return replace(self, num_ranks=num_ranks, mesh=mesh)


def _control(added: _Added, experts: int = 1) -> tuple[Cluster, Cluster]:
    small, large = (Cluster(f"{added}, {num} ranks", (num,), experts=experts, added=added) for num in (2, 4))
    return small, large


def _sharing(experts: int, cluster: Cluster) -> Cluster:
    return replace(cluster, name=f"{cluster.name}, experts on {experts}", experts=experts)


_ON_ONE = Cluster("1 rank", (1,))
_EAGER = (*(Cluster(f"{num} ranks", (num,)) for num in (2, 4, 8)),)
_HYBRID = tuple(Cluster(f"HSDP, {replicas} x {shards}", (replicas, shards)) for replicas, shards in ((2, 4), (4, 2)))
_CAPTURED = (
    Cluster("captured, 1 rank", (1,), captured=True),
    *(replace(each, name=f"captured, {each.name}", captured=True) for each in (*_EAGER[:2], _HYBRID[0])),
)
_RESUMED = (
    Cluster("begun on 8 ranks", (8,), ends=1),
    Cluster("gone on with 2", (2,), start=1, ends=2),
    Cluster("gone on with 2 x 2", (2, 2), start=2),
)
_CONTROLS = (_control("by FSDP2"), _control("microbatches one by one"), _control("rank-major"))
_ALL = (_ON_ONE, *_EAGER, *_HYBRID, *_CAPTURED, *_RESUMED)

_TITAN = (
    _ON_ONE,
    *_EAGER,
    Cluster("HSDP, 2 x 2", (2, 2)),
    *(replace(each, name=f"graph_trainer, {each.name}", captured=True) for each in _EAGER[:2]),
    Cluster("graph_trainer, HSDP, 2 x 2", (2, 2), captured=True),
    *_RESUMED,
)

_TWO, _FOUR, _EIGHT = (_sharing(2, each) for each in _EAGER)
_EXPERTS = (
    *(replace(each, name=f"graph_trainer, {each.name}", captured=True) for each in (_TWO, _FOUR)),
    _sharing(2, _HYBRID[0]),
)

CASES = (
    Case("GPT, added in bf16", decoder, None, _ALL, (*_CONTROLS, _control("dropout by rank"))),
    Case("Llama, added in fp32", llama, torch.float32, _ALL, _CONTROLS),
    Case(
        "torchtitan's llama3, added in bf16",
        Recipe("llama3", tied=True, layers=(0, 1), reduce_dtype="bfloat16"),
        None,
        _TITAN,
        _CONTROLS[:1],
    ),
    Case(
        "torchtitan's deepseek_v3, at any expert-parallel degree",
        Recipe("deepseek_v3", layers=(0, 1), num_experts=4, reduce_dtype="bfloat16"),
        None,
        (
            _ON_ONE,
            *_EAGER,
            *(_TWO, _FOUR, _EIGHT, _sharing(4, _EAGER[1])),
            *_EXPERTS,
            *(_sharing(2, _RESUMED[0]), _RESUMED[1]),
            Cluster("gone on with 4, experts on 4", (4,), experts=4, start=2),
        ),
        (_control("by FSDP2", experts=2),),
        any_expert_degree=True,
    ),
    Case(
        "torchtitan's deepseek_v3, at expert-parallel degree 2, added in fp32",
        Recipe("deepseek_v3", layers=(0, 1), num_experts=4, reduce_dtype="bfloat16"),
        torch.float32,
        (_TWO, _FOUR, _EIGHT, *_EXPERTS),
        (_control("by FSDP2", experts=2), (_TWO, _ON_ONE)),
    ),
)
SHORT = Case(
    "GPT on 2 and 4 ranks",
    decoder,
    None,
    (*_EAGER[:2], Cluster("HSDP, 2 x 2", (2, 2)), _CAPTURED[1]),
    _CONTROLS[:1],
)


def _parity(case: Case, captured: str) -> Case:
    """One rank, and two ranks that run a captured step; the control is one by FSDP2 itself."""
    two = Cluster(captured, (2,), captured=True)
    control = Cluster("by FSDP2, 2 ranks", (2,), added="by FSDP2")
    return replace(case, clusters=(_ON_ONE, two), controls=((_ON_ONE, control),))


PARITY = (SHORT, _parity(CASES[1], "captured, 2 ranks"), _parity(CASES[2], "graph_trainer, 2 ranks"))
"""What ``make parity`` shows."""
