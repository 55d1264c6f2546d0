"""Bytes that a step of a full-size model sends, read from graphs that one process traces for ranks in name only."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from experiments.graph_trainer_parity.cases import DEFAULTS, OURS
from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses.integrations.titan_cpu import use_cpu
from graphpasses.integrations.titan_cpu_configs import Recipe

__all__ = ["Volume", "volumes"]

Volume = tuple[float, float, int]


class _TracedOnlyError(Exception):
    """The step is traced and rewritten, and need not run."""


def volumes(recipe: Recipe, num_ranks: int, folder: Path) -> dict[str, Volume]:
    """Traces a step for rank 0 and runs graph_trainer's own passes over it, and ours; in a process of its own.

    Args:
        recipe: the model; this rank's shards are made, nothing is computed.
        num_ranks: that share it.
        folder: has ``tests/assets``.

    Returns:
        By pipeline: bytes that rings send per rank for all-gathers, reduce-scatters and all-reduces, those of
            reductions among them, and how many of these collectives there are.
    """
    warnings.simplefilter("ignore")  # torchtitan's
    logging.disable(logging.WARNING)
    dist.destroy_process_group()
    os.environ.update(NGPU=str(num_ranks), RANK="0", LOCAL_RANK="0")
    os.environ.update(HF_HOME=str(folder / "huggingface"), HF_HUB_OFFLINE="1")
    use_cpu()
    from torchtitan.experiments.graph_trainer import trainer as graph_trainer

    from graphpasses.integrations.graph_trainer import PIPELINE
    from graphpasses.integrations.titan_cpu_configs import trainer_config

    found: dict[str, Volume] = {}
    for name, pipeline in ((DEFAULTS, "default"), (OURS, PIPELINE)):
        config = trainer_config(recipe, folder, 1, pipeline)
        config.comm.mode = "fake_backend"
        trainer = config.build()
        batch, labels = next(trainer.batch_generator(trainer.dataloader))
        with (
            mock.patch.object(graph_trainer, "run_traced", side_effect=_TracedOnlyError),
            suppress(_TracedOnlyError),
        ):
            trainer.forward_backward_step(
                input_dict=batch, labels=labels, global_valid_tokens=torch.tensor(labels.numel())
            )
        found[name] = _volume(trainer._traced_step.gm)
        trainer.close()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def _volume(module: fx.GraphModule) -> Volume:
    sizes: dict[fx.Node, float] = {}
    for node in module.graph.nodes:
        name = str(node.target)
        if "all_gather" not in name and "reduce_scatter" not in name and "all_reduce" not in name:
            continue
        if not name.startswith("_c10d_functional"):
            continue
        tensors = [value.meta["val"] for value in (*node.all_input_nodes, node)]
        whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        group = next(arg for arg in reversed(node.args) if isinstance(arg, str) and arg not in ("sum", "avg"))
        num_ranks = len(named_group_ranks(group))
        sizes[node] = (2 if "all_reduce" in name else 1) * whole * (num_ranks - 1) / num_ranks
    reduced = sum(size for node, size in sizes.items() if "reduce" in str(node.target))
    return sum(sizes.values()), reduced, len(sizes)
