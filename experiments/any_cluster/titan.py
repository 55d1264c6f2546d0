"""Trains torchtitan's models with its own trainers, eager and graph_trainer's, and records every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from experiments.any_cluster.cases import NUM_MICROBATCHES, Case, Cluster
from experiments.graph_trainer_parity.ranks import as_torchrun
from experiments.harness.parity import TrainedRun
from experiments.harness.verdict import run_path
from graphpasses.simulate import Topology, configure

__all__ = ["train_titan"]


def train_titan(
    cases: Sequence[Case], num_steps: int, folder: Path, scratch: Path, ports: Sequence[int]
) -> Iterator[TrainedRun]:
    """Trains every run of every case on this rank; all ranks call it with the same arguments.

    Args:
        cases: of torchtitan, of one mesh.
        num_steps: optimizer steps of a whole run.
        folder: where run files go.
        scratch: has ``tests/assets``; gets what torchtitan writes.
        ports: of :func:`experiments.graph_trainer_parity.ranks.stores`, one for each run, and one for each case whose
            first weights are written.

    Yields:
        The runs, as they end.
    """
    num_ranks = dist.get_world_size()
    configure(Topology(num_ranks, gpus_per_node=num_ranks))
    with as_torchrun(scratch, ports) as begin:
        for case in cases:
            if num_ranks == 1:  # how weights are initialized depends on the mesh
                begin()
                seed = _config(case, Cluster("seed", (1,)), num_steps, scratch)
                seed.checkpoint.create_seed_checkpoint = True
                trainer = seed.build()
                trainer.checkpointer.save(curr_step=0, last_step=True)
                _close(trainer)
            for cluster in case.runs:
                begin()
                _train(case, cluster, num_steps, folder, scratch)
                yield TrainedRun(case.name, cluster.name)


def _train(case: Case, cluster: Cluster, num_steps: int, folder: Path, scratch: Path) -> None:
    from graphpasses.integrations.torchtitan.any_cluster import canonical_trainer
    from graphpasses.parity.record_trainer import recorded

    steps, config = cluster.steps(num_steps), _config(case, cluster, num_steps, scratch)
    if steps.start:
        config.checkpoint.load_step = steps.start
    else:
        config.checkpoint.initial_load_path = str(_dump(case, "seed", scratch) / "checkpoint" / "step-0")
    if cluster.added == "by FSDP2":
        trainer = config.build()
    else:
        apart = case.any_expert_degree
        trainer = canonical_trainer(config, accumulate=case.accumulate, any_expert_degree=apart)
    trainer.should_continue_training = lambda: trainer.step < steps.stop
    with recorded(trainer, run_path(folder, case.name, cluster.name), run=cluster.name, overwrite=True):
        trainer.train()
    _close(trainer)


def _config(case: Case, cluster: Cluster, num_steps: int, scratch: Path) -> Any:
    from graphpasses.integrations.torchtitan import pass_pipeline
    from graphpasses.integrations.torchtitan.cpu_configs import Recipe, trainer_config

    assert isinstance(case.build, Recipe)
    replicas = cluster.shape[0] if len(cluster.shape) > 1 else 1
    recipe = replace(
        case.build,
        num_replicas=replicas,
        expert_parallel=cluster.experts,
        global_batch_size=NUM_MICROBATCHES,
    )
    config = trainer_config(recipe, scratch, num_steps, pass_pipeline.PIPELINE if cluster.captured else None)
    config.optimizer.implementation = "foreach"  # the fused one's bits depend on a shard's place
    # One that goes on reads what another has written.
    config.dump_folder = str(_dump(case, "resumed" if cluster.start or cluster.ends < 3 else cluster.name, scratch))
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, False
    config.checkpoint.interval = max(num_steps // 3, 1) if cluster.ends < 3 else num_steps + 1
    return config


def _dump(case: Case, name: str, scratch: Path) -> Path:
    return scratch / "dump" / case.name / name


def _close(trainer: Any) -> None:
    trainer.close()
    dist.destroy_process_group()
