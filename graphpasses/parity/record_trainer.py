"""Hashes of every step of torchtitan's trainers, in a run file that ``graphpasses compare`` reads."""

from __future__ import annotations

import functools
import logging
import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2 import read_groups
from graphpasses._torch.group_ranks import gathered
from graphpasses.errors import GraphPassesError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout
from graphpasses.graph import TrainGraph
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, buckets_of
from graphpasses.parity.hashing import named_gradients, named_weights
from graphpasses.parity.record import ParityRecorder
from graphpasses.parity.run_file import GRADIENT_NORM

logger = logging.getLogger(__name__)


@contextmanager
def recorded(
    trainer: Any,
    path: str | os.PathLike[str],
    *,
    run: str = "",
    topology: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Iterator[ParityRecorder]:
    """Records each step that a trainer makes inside: losses, clipped gradients and their norm, weights.

    Of an eager trainer the bucket layouts are recorded, too, and of the pipeline ``graphpasses`` the layouts of its
    graph and what its passes did; with pipeline parallelism those of the first rank's stages. All ranks call it with
    a trainer of torchtitan, built. The topology describes the cluster; anything that JSON takes.

    Raises:
        RunFileError: see :class:`graphpasses.parity.ParityRecorder`.

    Example, with a trainer of torchtitan's::

        with recorded(trainer, "eager.jsonl"):
            trainer.train()
    """
    parts: list[nn.Module] = trainer.model_parts
    config, metrics = trainer.config, trainer.metrics_processor
    losses: list[Tensor] = []
    norms: list[float] = []

    def forward_backward_step(**inputs: Any) -> Any:
        loss = run_forward_backward(**inputs)
        losses.append(loss.detach().clone())
        return loss

    def log(step: int, average: float, maximum: float, grad_norm: float, **more: Any) -> None:
        norms.append(grad_norm)
        write_log(step, average, maximum, grad_norm, **more)

    def train_step(batches: Any) -> None:
        losses.clear()
        norms.clear()
        run_step(batches)
        gradients: dict[str, Tensor | None] = dict(ChainMap(*map(named_gradients, parts)))
        weights = dict(ChainMap(*map(named_weights, parts)))  # of a buffer that several have the first one's
        if norms:  # torchtitan's, of the steps that it logs
            gradients[GRADIENT_NORM] = torch.tensor(norms[-1], dtype=torch.float64, device="cpu")
        recorder.record(trainer.step, torch.stack(losses).sum(), weights, gradients)

    run_forward_backward, run_step, write_log = trainer.forward_backward_step, trainer.train_step, metrics.log
    hooks = (
        (trainer, "forward_backward_step", forward_backward_step),
        (trainer, "train_step", train_step),
        (metrics, "log", log),
    )
    eager = (buckets_of(part, config)[1] for part in parts)
    with ExitStack() as stack:
        recorder = stack.enter_context(
            ParityRecorder(
                path,
                run=run,
                model=f"{config.model_spec.name.rpartition('/')[2]} {config.model_spec.flavor}",
                seed=config.debug.seed,
                topology=topology,
                layouts=_joined(eager) if all(map(read_groups, parts)) else None,
                per_rank=[name for part in parts for name in _partial_buffers(part)],
                overwrite=overwrite,
                group=_stage_group(trainer.parallel_dims),
            )
        )
        on_rewritten = functools.partial(_record_rewritten, recorder, {})
        for owner, name, hook in (*hooks, (trainer, ON_REWRITTEN, on_rewritten)):
            stack.enter_context(mock.patch.object(owner, name, hook, create=True))
        yield recorder


def _partial_buffers(model: nn.Module) -> list[str]:
    """Returns the buffers of which each rank holds its own summand: how many tokens its routers sent where."""
    return [
        name
        for name, buffer in model.named_buffers()
        if isinstance(buffer, DTensor) and any(each.is_partial() for each in buffer.placements)
    ]


def _stage_group(dims: Any) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that have this rank's stages of a pipeline; None without a pipeline."""
    if dims.pp == 1:
        return None
    places = gathered(int(dims.get_mesh("pp").get_local_rank()))
    ranks = [[rank for rank, each in enumerate(places) if each == place] for place in sorted(set(places))]
    # All ranks make all of them.
    own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks)[0]  # type: ignore[no-untyped-call]
    return own


def _record_rewritten(
    recorder: ParityRecorder,
    stages: dict[int, tuple[PipelineReport, TrainGraph]],
    report: PipelineReport,
    step: TrainGraph,
) -> None:
    """Records what the pipeline ``graphpasses`` did to a trainer's step, or to a rank's stages, one after another."""
    stages[id(step.model)] = report, step
    reports = [each for each, _ in stages.values()]
    names = ["step"] if len(reports) == 1 else [f"part {index} of the model" for index in range(len(reports))]
    recorder.record_passes(dict(zip(names, reports, strict=True)))
    layout = _joined(graph_layout(each) for _, each in stages.values())
    if layout is not None:
        recorder.record_layouts(layout)


def _joined(layouts: Iterable[Layout]) -> Layout | None:
    try:
        return Layout(tuple(bucket for each in layouts for bucket in each.buckets))
    except GraphPassesError as error:  # the run can do without it
        logger.warning(f"the bucket layouts of this run are not recorded: {error}")
        return None
