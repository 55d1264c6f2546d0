"""torchtitan's passes, and what runs in the place of some."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx
from torchtitan.experiments.graph_trainer import passes as titan

from graphpasses._torch.exact_kernels import divisions_kept

BUCKETING = "joint_transformer_block_bucketing_reordering_pass"

# Ours in the places of torchtitan's, whose canonicalization would change the views by which ours know a step.
_OURS_FOR = {
    "canonicalize_graph_pass": (),
    "deduplicate_fsdp_unshard_chains_pass": ("deduplicate-shared",),
    BUCKETING: (
        "coalesce-grad-reductions",
        "bucket-fsdp-collectives",
        "reshard-after-forward",
        "prefetch-collectives",
        "update-in-backward",
    ),
    "schedule_fsdp_comms_to_dense_regions_pass": (),  # of torchtitan's own buckets
}
_REGION = "compile_with_inductor"

Pass: TypeAlias = Callable[..., fx.GraphModule]


def name_of(each: Any) -> str:
    name: str = getattr(each, "func", each).__name__
    return name


def with_ours(name: str, each: Pass, ours: Mapping[str, Pass]) -> Sequence[Pass]:
    """Returns what runs in the place of one of torchtitan's passes, which may be itself."""
    return [ours[its] for its in _OURS_FOR[name] if its in ours] if name in _OURS_FOR else [each]


def inductor_passes(compile_config: Any, **options: Any) -> list[Pass]:
    """Takes the place of ``final_inductor_compile_passes``: FlexAttention divides as in torchtitan's eager trainer.

    The eager trainer compiles it with the settings of the process. ``regional_inductor_pass`` changes one of them, by
    which Triton rounds quotients: those with which Inductor puts the parts of short sequences together.
    """
    theirs = titan.final_inductor_compile_passes(compile_config, **options)
    return [
        functools.partial(regional_inductor_pass, theirs=each)
        if name_of(each) == regional_inductor_pass.__name__
        else each
        for each in theirs
    ]


def regional_inductor_pass(gm: fx.GraphModule, example_inputs: Any, *, theirs: Pass) -> fx.GraphModule:
    """Compiles the marked regions with the setting that the process had, and leaves it so."""
    with divisions_kept() as kept:
        for node in gm.graph.nodes:
            custom = node.meta.get("custom", {})
            if _REGION in custom:
                region = {**custom[_REGION], "inductor_configs": custom[_REGION].get("inductor_configs", {}) | kept}
                node.meta["custom"] = {**custom, _REGION: region}
        return theirs(gm, example_inputs)
