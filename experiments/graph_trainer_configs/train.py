"""Trains a configuration with one of torchtitan's real trainers, on a rank of ``run_ranks``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from experiments.graph_trainer_configs.upstream import Configuration
from experiments.graph_trainer_parity.ranks import as_torchrun
from graphpasses.errors import GraphPassesError
from graphpasses.integrations.torchtitan.cpu_configs import make_repeatable
from graphpasses.simulate import Topology, configure

__all__ = ["Failure", "Side", "train"]

Side = Literal["eager", "ours", "graph_trainer"]
Failure = tuple[Literal["refused", "failed"], str]

_NUM_LAYERS = 3
_NEWER_BACKEND = {"muse_glimmer"}  # models whose eager trainer does not know ``partial_dtensor``
_IN_HALVES = {"ZBVZeroBubble", "DualPipeV"}  # schedules that compute weights' gradients apart
_PIPELINES = {"ours": "graphpasses", "graph_trainer": "default"}


def train(
    configuration: Configuration, side: Side, num_steps: int, path: Path, scratch: Path, ports: Sequence[int]
) -> Failure | None:
    """Trains a configuration on this rank and records it; all ranks call it with the same arguments.

    Args:
        configuration: what to train.
        side: torchtitan's eager trainer, graph_trainer with our pipeline, or with its own.
        num_steps: optimizer steps.
        path: of the run file.
        scratch: has ``tests/assets``; gets what torchtitan writes.
        ports: see ``as_torchrun``.

    Returns:
        Why it cannot be trained, or None.
    """
    configure(Topology(dist.get_world_size(), gpus_per_node=2))
    os.chdir(scratch)
    with as_torchrun(scratch, ports) as begin:
        from graphpasses.integrations.torchtitan import pass_pipeline  # noqa: F401  registers it
        from graphpasses.parity.record_trainer import recorded

        begin()
        try:
            trainer = _trainer(configuration, side, num_steps, scratch / side)
            with recorded(trainer, path, run=side, overwrite=True):
                trainer.train()
            trainer.close()
        except GraphPassesError as error:
            return "refused", str(error)
        except (Exception, SystemExit) as error:
            return "failed", f"{type(error).__name__}: {_first_line(error)}"
    return None


def _trainer(configuration: Configuration, side: Side, num_steps: int, folder: Path) -> Any:
    from graphpasses.integrations.torchtitan.chunks import chunked_trainer

    config = trainer_config(configuration, side, num_steps, folder)
    if side == "eager" and (chunks := configuration.chunks):
        return chunked_trainer(config, *chunks)
    return config.build()


def trainer_config(configuration: Configuration, side: Side, num_steps: int, folder: Path) -> Any:
    """Returns what torchtitan's command line makes of the options, small enough for a CPU.

    Args:
        configuration: whose options.
        side: see :func:`train`.
        num_steps: optimizer steps.
        folder: gets what torchtitan writes.
    """
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    options = configuration.eager_options if side == "eager" else configuration.options
    # The options are checked as they are read.
    config: Any = ConfigManager().parse_args([*options, "--training.disable_cuda_graphs"])
    model, training = config.model_spec.model, config.training
    model.layers = model.layers[:_NUM_LAYERS]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    backend = config.parallelism.spmd_backend
    make_repeatable(config, Path(), num_steps)
    if side == "eager" and config.model_spec.name in _NEWER_BACKEND:
        config.parallelism.spmd_backend = backend
    config.dump_folder = str(folder)
    if config.parallelism.pipeline_parallel_degree == 1:  # else a batch is cut into microbatches
        most = 4 if configuration.chunks else 2  # half a chunked batch is to be more than one sample
        training.local_batch_size, training.global_batch_size = min(training.local_batch_size, most), -1
    if config.parallelism.pipeline_parallel_schedule in _IN_HALVES:
        config.loss = getattr(config.loss, "loss_fn", config.loss)  # in chunks, eager loses a gradient
        config.activation_checkpoint = None  # which eager cannot do there, and which changes no bits
    config.checkpoint.enable = False
    if side == "eager":
        config.compile.enable = False
    else:
        config.compile.pass_pipeline = _PIPELINES[side]
    return config


def _first_line(error: BaseException) -> str:
    """Returns what an error says first, without where this machine has its packages."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"[^\s(]*/site-packages/", "", lines[0])
