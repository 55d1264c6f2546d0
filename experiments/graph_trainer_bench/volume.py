"""Bytes that a step of a full-size model sends, read from the graph that one process traces for all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx

from experiments.graph_trainer_parity.cases import DEFAULTS, OURS
from experiments.graph_trainer_parity.ranks import own_groups
from graphpasses.analysis.parameter_collectives import collective_ranks
from graphpasses.integrations.torchtitan.cpu_configs import Recipe, trainer_config

__all__ = ["Volume", "ring_bytes", "volumes"]

Volume = tuple[float, float, int]
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


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
    os.environ.update(NGPU=str(num_ranks), RANK="0", LOCAL_RANK="0")
    with own_groups(folder):
        from torchtitan.experiments.graph_trainer import trainer as graph_trainer

        from graphpasses.integrations.torchtitan.pass_pipeline import PIPELINE

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
    return found


def ring_bytes(operator: str, tensors: Iterable[Tensor], num_ranks: int) -> float:
    """Returns the bytes that a rank of a ring sends for a collective.

    Args:
        operator: its name.
        tensors: what it reads and writes; the largest is what all ranks' parts make up.
        num_ranks: of its process group.
    """
    whole = max(tensor.nbytes for tensor in tensors)
    num_rounds = 2 if "all_reduce" in operator or "allreduce" in operator else 1
    return num_rounds * whole * (num_ranks - 1) / num_ranks


def _volume(module: fx.GraphModule) -> Volume:
    sizes: dict[fx.Node, float] = {}
    for node in module.graph.nodes:
        name = str(node.target)
        if name.startswith("_c10d_functional") and any(kind in name for kind in _KINDS):
            tensors = [value.meta["val"] for value in (*node.all_input_nodes, node)]
            sizes[node] = ring_bytes(name, tensors, len(collective_ranks(node)))
    reduced = sum(size for node, size in sizes.items() if "reduce" in str(node.target))
    return sum(sizes.values()), reduced, len(sizes)
