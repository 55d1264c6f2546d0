"""torchtitan's graph_trainer on 8, 64 and 256 ranks of a fake process group: its buckets are eager FSDP2's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import fx

from experiments.fsdp_parity.orders import reorder
from experiments.graph_trainer_parity.ranks import own_groups
from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses.analysis.parameter_collectives import ALL_REDUCE, REDUCE_SCATTER, find_gathers
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.errors import GraphPassesError
from graphpasses.fsdp import BucketPlan, diff_layouts, eager_layout
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.graph import argument, is_collective, wait_of
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from graphpasses.passes.runner import Pipeline

NUM_LAYERS = 2  # of the debug models' six or eight: a dense and a MoE layer of DeepSeek's, in less time
LAYERS = tuple(range(NUM_LAYERS))
RECIPES = {
    "llama3 tied": Recipe("llama3", tied=True, layers=LAYERS),
    "llama3 biased": Recipe("llama3", biased=True, layers=LAYERS),
    "qwen3 tied": Recipe("qwen3", tied=True, layers=LAYERS),
    "deepseek_v3": Recipe("deepseek_v3", layers=LAYERS),
    "hybrid": Recipe("llama3", tied=True, layers=LAYERS, num_replicas=2),
}
# Unevenly many for 64 ranks.
RECIPES["96 experts"] = RECIPES["deepseek_v3"]
# Controls: what to do other than eager does, to which model.
RECIPES |= {"sorted": RECIPES["llama3 biased"], "not coalesced": RECIPES["llama3 tied"]}
UNEVEN = ("llama3 biased", "qwen3 tied")
# What each process plays: sizes and ranks of which DTensor's caches take no mesh for another one. Each model has the
# smallest size or the largest; `make scale` trains on 64 ranks.
EVEN = ("llama3 tied", "llama3 biased", "deepseek_v3")
JOBS = (
    ((8, 0, (*EVEN, "sorted", "not coalesced")), (64, 0, ("deepseek_v3", "96 experts"))),
    ((256, 0, UNEVEN),),
    ((256, 255, UNEVEN),),
    ((256, 0, ("hybrid",)),),
)
PLAYED = [
    (num_ranks, rank, name)
    for job in JOBS
    for num_ranks, rank, names in job
    for name in names
    if name not in ("sorted", "not coalesced") and not (name == "deepseek_v3" and num_ranks > 8)
]


@dataclass(frozen=True)
class Step:
    """What graph_trainer made of a step on one rank. Values are garbage there, and nobody looks at them.

    Args:
        error: what was raised, and its type.
        difference: of the rewritten graph's layout from eager's.
        num_eager: eager's reductions, by collective.
        num_reductions: the graph's.
        collectives: in order: operator, ranks in its group, dtype, shape and further arguments.
        gathered: FQNs of the parameters that each all-gather brings, sorted.
        is_prefetched: whether each all-gather is launched before the one in front of it is waited for.
        smallest_shard: elements of this rank's smallest part of a parameter.
    """

    error: str = ""
    difference: str = ""
    num_eager: tuple[int, int] = (0, 0)
    num_reductions: tuple[int, int] = (0, 0)
    collectives: tuple[tuple[object, ...], ...] = ()
    gathered: tuple[tuple[str, ...], ...] = ()
    is_prefetched: bool = False
    smallest_shard: int = 0


def in_other_order(plan: BucketPlan, **options: Any) -> Pipeline:
    """The pipeline for buckets as eager has them, but each packed by name."""
    return default_pipeline(reorder(plan, str), **options)


def step_of(name: str, folder: Path) -> Step:
    from graphpasses.integrations.torchtitan import pass_pipeline
    from graphpasses.integrations.torchtitan.cpu_configs import trainer_config
    from graphpasses.integrations.torchtitan.eager_model import eager_reference

    config = trainer_config(RECIPES[name], folder, 1, pass_pipeline.PIPELINE)
    config.comm.mode = "fake_backend"
    if name == "96 experts":
        for layer in config.model_spec.model.layers:
            set_experts(layer, 8, 96)
    if name == "not coalesced":
        config.compile.disable_passes = ["coalesce_grad_reductions_pass"]
    pipeline = in_other_order if name == "sorted" else default_pipeline
    trainer = config.build()
    try:
        batch, labels = next(trainer.batch_generator(trainer.dataloader))
        with patch.object(pass_pipeline, "default_pipeline", pipeline):
            trainer.forward_backward_step(
                input_dict=batch, labels=labels, global_valid_tokens=torch.tensor(labels.numel())
            )
        (eager,) = eager_reference(trainer)
        return read_step(trainer, eager)
    except GraphPassesError as error:
        return Step(error=f"{type(error).__name__}: {error}")
    finally:
        trainer.close()
        dist.destroy_process_group()


def set_experts(config: Any, old: int, new: int) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in ("num_experts", "out_features") and value == old:  # the router has an output for each
            setattr(config, field.name, new)
        elif is_dataclass(value):
            set_experts(value, old, new)


def read_step(trainer: Any, eager: torch.nn.Module) -> Step:
    model = trainer.model_parts[0]
    graph = read_traced_result(trainer._traced_step, model=model)
    asked = eager_layout(eager, without_gradient=graph.without_gradient)
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    gathers = find_gathers(graph)
    kinds = ("reduce_scatter", "all_reduce")
    return Step(
        difference=str(diff_layouts(asked, graph_layout(graph))),
        num_eager=tuple(sum(bucket.collective == kind for bucket in asked.buckets) for kind in kinds),
        num_reductions=tuple(sum(node.target == target for node in order) for target in (REDUCE_SCATTER, ALL_REDUCE)),
        collectives=tuple(collective(node) for node in order if is_collective(node)),
        gathered=tuple(tuple(sorted(gather.fqns)) for gather in gathers),
        is_prefetched=all(
            order[after.all_gather] < order[wait_of(before.all_gather)] for before, after in pairwise(gathers)
        ),
        smallest_shard=min(parameter.to_local().numel() for parameter in model.parameters()),
    )


def collective(node: fx.Node) -> tuple[object, ...]:
    """What every rank of the group must launch alike; where groups differ, of as many ranks."""
    *others, group = node.args[1:]
    value = argument(node).meta["val"]
    num_ranks = len(named_group_ranks(str(group)))
    return str(node.target), num_ranks, str(value.dtype), tuple(value.shape), tuple(map(str, others))


def play(jobs: Any, folder: Path) -> dict[tuple[int, int, str], Step]:
    """Plays this process's job."""
    steps: dict[tuple[int, int, str], Step] = {}
    job = jobs[dist.get_rank()]
    with own_groups(folder):
        for num_ranks, rank, names in job:
            os.environ.update(NGPU=str(num_ranks), RANK=str(rank), LOCAL_RANK="0")
            for name in names:
                steps[num_ranks, rank, name] = step_of(name, folder)
    return steps


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], Step]:
    pytest.importorskip("torchtitan")
    folder = tmp_path_factory.mktemp("titan")
    make_assets(folder)
    played: dict[tuple[int, int, str], Step] = {}
    for each in run_ranks(play, len(JOBS), JOBS, folder):
        played.update(each)
    return played


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_ranks", "rank", "name"), PLAYED)
def test_buckets_are_eagers(steps: dict[tuple[int, int, str], Step], num_ranks: int, rank: int, name: str) -> None:
    step = steps[num_ranks, rank, name]
    assert not step.error
    assert step.difference == "layouts are equal"
    # One per layer; embedding, norm and lm_head are one group where they are tied, else two.
    num_groups = NUM_LAYERS + (1 if RECIPES[name].tied else 2)
    assert step.num_eager == step.num_reductions == (num_groups, num_groups * (name == "hybrid"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_decide_alike(steps: dict[tuple[int, int, str], Step], name: str) -> None:
    first, last = (steps[256, rank, name] for rank in (0, 255))
    assert len(first.collectives) > NUM_LAYERS
    assert first.collectives == last.collectives
    assert first.gathered == last.gathered


@pytest.mark.multiprocess
def test_some_ranks_have_parameters_without_elements(steps: dict[tuple[int, int, str], Step]) -> None:
    """Else the tests above would not see decisions that depend on a rank's own shards."""
    assert steps[256, 0, "qwen3 tied"].smallest_shard > 0
    assert steps[256, 255, "qwen3 tied"].smallest_shard == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_ranks", "rank", "name"), PLAYED)
def test_all_gathers_follow_the_layers(
    steps: dict[tuple[int, int, str], Step], num_ranks: int, rank: int, name: str
) -> None:
    """Forward 0 to N, backward N to 0, each bucket in flight while the one before it computes."""
    step = steps[num_ranks, rank, name]
    layers = [{fqn.split(".")[1] for fqn in fqns if fqn.startswith("layers.")} for fqns in step.gathered]
    forward = [{str(layer)} for layer in range(NUM_LAYERS)]
    assert [layer for layer in layers if layer] == forward + forward[::-1]
    assert step.is_prefetched


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "moved"),
    [("sorted", "layers.0.attention.wo.bias"), ("not coalesced", "tok_embeddings.weight")],
)
def test_other_buckets_are_refused(steps: dict[tuple[int, int, str], Step], name: str, moved: str) -> None:
    error = steps[8, 0, name].error
    assert error.startswith("LayoutError: the graph cannot meet the layout that was asked for")
    assert re.search(rf"^{re.escape(moved)} +bucket", error, re.MULTILINE)


@pytest.mark.multiprocess
def test_experts_that_eager_shards_on_another_dim_are_refused(steps: dict[tuple[int, int, str], Step]) -> None:
    error = steps[64, 0, "deepseek_v3"].error
    assert error.startswith(
        "UnsupportedError: torchtitan's eager trainer shards "
        "'layers.1.moe.routed_experts.inner_experts.w1_EFD' of shape (8, 256, 256) as Shard(1), graph_trainer as "
        "Shard(0) over 64 ranks"
    )
