"""Hashes of every step of torchtitan's trainers, in a run file that ``graphpasses compare`` reads."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2 import parameter_groups
from graphpasses.errors import GraphPassesError, LayoutError, UnsupportedError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout
from graphpasses.graph import TrainGraph
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, buckets_of
from graphpasses.parity.hashing import named_gradients
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
    graph and what its passes did. All ranks call it with a trainer of torchtitan, built. The topology describes the
    cluster; anything that JSON takes.

    Raises:
        UnsupportedError: the trainer has several model parts, as with pipeline parallelism.
        RunFileError: see :class:`graphpasses.parity.ParityRecorder`.

    Example, with a trainer of torchtitan's::

        with recorded(trainer, "eager.jsonl"):
            trainer.train()
    """
    if len(trainer.model_parts) != 1:
        raise UnsupportedError(
            f"this rank's trainer has {len(trainer.model_parts)} model parts; only runs without pipeline parallelism "
            "can be recorded"
        )
    (model,) = trainer.model_parts
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
        gradients: dict[str, Tensor | None] = dict(named_gradients(model))
        if norms:  # torchtitan's, of the steps that it logs
            gradients[GRADIENT_NORM] = torch.tensor(norms[-1], dtype=torch.float64)
        recorder.record(trainer.step, torch.stack(losses).sum(), model, gradients)

    run_forward_backward, run_step, write_log = trainer.forward_backward_step, trainer.train_step, metrics.log
    hooks = (
        (trainer, "forward_backward_step", forward_backward_step),
        (trainer, "train_step", train_step),
        (metrics, "log", log),
    )
    with ExitStack() as stack:
        recorder = stack.enter_context(
            ParityRecorder(
                path,
                run=run,
                model=f"{config.model_spec.name.rpartition('/')[2]} {config.model_spec.flavor}",
                seed=config.debug.seed,
                topology=topology,
                layouts=_eager_layout(model, config),
                per_rank=_partial_buffers(model),
                overwrite=overwrite,
            )
        )
        on_rewritten = functools.partial(_record_rewritten, recorder)
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


def _record_rewritten(recorder: ParityRecorder, report: PipelineReport, step: TrainGraph) -> None:
    """Records what the pipeline ``graphpasses`` did to a trainer's step."""
    recorder.record_passes(report)
    try:
        recorder.record_layouts(graph_layout(step))
    except LayoutError as error:  # the run can do without it
        logger.warning(f"the bucket layouts of this run are not recorded: {error}")


def _eager_layout(model: nn.Module, config: Any) -> Layout | None:
    """Returns the layout of an eager trainer's reductions; a run can do without it."""
    if not parameter_groups(model):
        return None
    try:
        return buckets_of(model, config)[1]
    except GraphPassesError as error:
        logger.warning(f"the bucket layouts of this run are not recorded: {error}")
        return None
