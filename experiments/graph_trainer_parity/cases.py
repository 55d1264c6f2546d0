"""What is trained, and what must or must not give the bits of torchtitan's own trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.verdict import Comparison, Must
from graphpasses.integrations.torchtitan.cpu_configs import Recipe

__all__ = [
    "CASES",
    "CHECKPOINT_STEP",
    "DEFAULTS",
    "DIVIDED",
    "EAGER",
    "NORM_REVERSED",
    "OURS",
    "RESTARTS",
    "SORTED",
    "Case",
]

EAGER, OURS, DEFAULTS = "eager", "graphpasses", "graph_trainer's own passes"
SORTED = "parameters sorted by name"
DIVIDED = "experts' gradients divided by the expert parallel degree"
NORM_REVERSED = "norm of the gradients added in reverse"
CHECKPOINT_STEP = 10
# A run of our pipeline from a checkpoint of another run.
RESTARTS = {f"from {name}'s checkpoint of step {CHECKPOINT_STEP}": name for name in (OURS, EAGER)}


@dataclass(frozen=True)
class Case:
    """One model, trained eagerly and by graph_trainer in several ways.

    Args:
        name: for the table.
        recipe: the model.
        must: the ways of graph_trainer, and what each must be.
        num_ranks: number of processes, two to a node.
    """

    name: str
    recipe: Recipe
    must: tuple[tuple[str, Must], ...] = ((OURS, "equal"),)
    num_ranks: int = 4

    @property
    def variants(self) -> tuple[str, ...]:
        """Eager and the ways of graph_trainer."""
        return (EAGER, *(variant for variant, _ in self.must))

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every way against eager; runs from a checkpoint have the steps that are left."""
        return tuple(
            Comparison(variant, EAGER, must, CHECKPOINT_STEP if variant in RESTARTS else 0)
            for variant, must in self.must
        )

    @property
    def has_restarts(self) -> bool:
        """Whether checkpoints are written."""
        return any(variant in RESTARTS for variant in self.variants)

    def dump_folder(self, scratch: Path, variant: str) -> Path:
        """Where torchtitan's trainer of a variant writes; one that restarts writes beside what it reads."""
        return scratch / "dump" / self.name / RESTARTS.get(variant, variant)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Trainers of equal meshes may share processes: DTensor's caches take other meshes of equal names for one."""
        recipe = self.recipe
        return self.num_ranks, recipe.num_replicas, recipe.tensor_parallel, recipe.expert_parallel

    @property
    def topology(self) -> dict[str, Any]:
        """The cluster that the processes play."""
        return {"num_ranks": self.num_ranks, "gpus_per_node": 2, "mode": "rail"}


_OURS, _UNLIKE = (OURS, "equal"), (DEFAULTS, "differ")
CASES = (
    Case("llama3", Recipe("llama3"), (_OURS, (DEFAULTS, "equal"))),
    Case("llama3 tied", Recipe("llama3", tied=True), (_OURS, *((name, "equal") for name in RESTARTS), _UNLIKE)),
    # Four ranks' bf16 gradients add exactly in torchtitan's fp32, so that their order shows in bf16 only.
    Case(
        "llama3 biased, bf16 reduction",
        Recipe("llama3", biased=True, reduce_dtype="bfloat16"),
        (_OURS, _UNLIKE, (SORTED, "differ")),
    ),
    Case("llama3 chunked loss", Recipe("llama3", chunked_loss=True), (_OURS, _UNLIKE)),
    Case(
        "qwen3 tied, chunked loss",
        Recipe("qwen3", tied=True, chunked_loss=True, layers=(0, 1, 2)),
        (_OURS, _UNLIKE),
    ),
    Case("deepseek_v3", Recipe("deepseek_v3", layers=(0, 1, 2))),
    Case("llama3 tied, 2 replicas", Recipe("llama3", tied=True, num_replicas=2), (_OURS, _UNLIKE)),
    Case("llama3, tensor parallel 2", Recipe("llama3", tensor_parallel=2)),
    # Four ranks share each expert: fewer, and gradients would have but one order.
    Case(
        "deepseek_v3, expert parallel 2, bf16 reduction",
        Recipe("deepseek_v3", layers=(0, 1), expert_parallel=2, reduce_dtype="bfloat16"),
        (_OURS, (SORTED, "differ")),
        num_ranks=8,
    ),
    Case(
        "deepseek_v3, expert parallel 2, 4 experts on dim 1",
        Recipe("deepseek_v3", layers=(0, 1), expert_parallel=2, num_experts=4),
        num_ranks=8,
    ),
    Case(
        "deepseek_v3, expert parallel 2, tensor parallel 2, all computed again",
        Recipe("deepseek_v3", layers=(0, 1), expert_parallel=2, tensor_parallel=2, checkpointing="full"),
    ),
    Case(
        "deepseek_v3, expert parallel 2, 2 replicas",
        Recipe("deepseek_v3", layers=(0, 1), expert_parallel=2, num_replicas=2),
    ),
    Case(
        "qwen3 experts, expert parallel 4, some computed again",
        Recipe(
            "qwen3",
            "debugmodel_moe",
            layers=(0, 1),
            num_experts=8,
            expert_parallel=4,
            checkpointing="selective",
        ),
        (_OURS, (DIVIDED, "differ"), (NORM_REVERSED, "differ")),
    ),
)
