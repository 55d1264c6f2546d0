"""Trains a cell eagerly and compiled on this rank, and says how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines
from torchrec.optim.keyed import KeyedOptimizer

import graphpasses as gp
from experiments.harness.outcome import Outcome
from experiments.torchrec_parity.state import whole_state
from experiments.torchrec_support.batches import make_batches
from experiments.torchrec_support.cells import Cell
from experiments.torchrec_support.models import LR, build
from graphpasses.errors import GraphPassesError
from graphpasses.graph.pass_report import Numerics

__all__ = ["train_cells"]

States = list[dict[str, Tensor]]


def train_cells(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Trains cells; all ranks call it with the same arguments.

    Args:
        cells: what to try; those after one that leaves ranks waiting for each other are not.

    Yields:
        Each cell with what came of it, the same on all ranks.
    """
    together = dist.new_group(timeout=timedelta(minutes=30))
    for cell in cells:
        outcome = _outcome(cell, together)
        yield cell, outcome
        if outcome.kind in ("eager cannot", "fails", "refused") and not _is_in_step(together):
            return


def _is_in_step(together: dist.ProcessGroup) -> bool:
    """Whether the ranks' next collectives are the same: a rank that fails leaves others in the midst of one."""
    total = torch.ones(())
    try:
        dist.all_reduce(total)
    except RuntimeError:
        total.zero_()
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, total.item() == dist.get_world_size(), group=together)
    return all(everyone)


def _outcome(cell: Cell, together: dist.ProcessGroup) -> Outcome:
    eager, failure = _try(partial(_train, cell), together)
    if failure is not None:
        return Outcome("eager cannot", _text(failure))
    # The control: were the tables trained otherwise, a comparison of as many numbers would tell.
    control, failure = _try(partial(_train, cell, lr=LR * 1.01), together)
    if failure is not None or not _difference(eager, control):
        return Outcome("no control", "another learning rate of the tables leaves all numbers as they are")
    report = gp.CompileReport()
    compiled, failure = _try(partial(_train, cell, report=report), together)
    torch._dynamo.reset()
    if failure is not None:
        return Outcome("refused" if isinstance(failure, GraphPassesError) else "fails", _text(failure))
    graphs = "" if report.num_graphs == 1 else f"{report.num_graphs} graphs"
    difference = _difference(eager, compiled)
    if not difference:
        return Outcome("bits", graphs)
    rounds = _rounding_passes(report)
    if rounds and not _difference(eager, compiled, tolerance=1e-5):
        return Outcome("rounding", f"{rounds} says so; {difference}")
    return Outcome("differs", difference)


def _rounding_passes(report: gp.CompileReport) -> str:
    """Returns the passes that rewrote the model and say that they may round."""
    passes = (each for _, _, stage in report.stages for each in stage.passes)
    return ", ".join(dict.fromkeys(p.name for p in passes if p.num_rewrites and p.numerics is Numerics.ROUNDING))


def _try(
    train: Callable[[], Iterator[dict[str, Tensor]]], together: dist.ProcessGroup
) -> tuple[States, Exception | None]:
    """Trains, and returns the states after each step; or the failure of the first rank that has one."""
    states: States = []
    failure: Exception | None = None
    try:
        states = list(train())
    except Exception as error:
        failure = error
    everyone: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _portable(failure), group=together)
    return states, next((error for error in everyone if error is not None), None)


def _portable(error: Exception | None) -> Exception | None:
    """Returns an error that another process can read."""
    if error is None or type(error) in (
        RuntimeError,
        AssertionError,
        NotImplementedError,
        ValueError,
        TypeError,
    ):
        return None if error is None else type(error)(str(error))
    if isinstance(error, GraphPassesError):
        return GraphPassesError(f"{type(error).__name__}: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")


def _train(cell: Cell, lr: float = LR, report: gp.CompileReport | None = None) -> Iterator[dict[str, Tensor]]:
    model, optimizer = build(cell, lr)
    batches = make_batches(cell)
    run = model if report is None else _compile(cell, model, report)
    if not cell.pipeline:
        for batch in batches:
            optimizer.zero_grad()
            loss, prediction = run(batch)
            loss.backward()
            optimizer.step()
            yield _state(model, optimizer, loss, prediction)
        return
    pipeline = _pipeline(cell, run, model, optimizer, report)
    steps = iter(batches)
    for _ in batches:
        yield _state(model, optimizer, pipeline.progress(steps))


def _compile(cell: Cell, model: nn.Module, report: gp.CompileReport) -> Any:
    pipeline = gp.recommender_pipeline(lower_embedding_bags=cell.sharding == "none")
    return gp.compile(model, pipeline=pipeline, inner="aot_eager", report=report)


def _pipeline(
    cell: Cell, run: Any, model: nn.Module, optimizer: KeyedOptimizer, report: gp.CompileReport | None
) -> Any:
    kind = getattr(train_pipelines, cell.pipeline, None) or getattr(experimental_pipelines, cell.pipeline)
    return kind(run, optimizer, torch.device("cpu"))


def _state(model: nn.Module, optimizer: KeyedOptimizer, *outputs: Tensor) -> dict[str, Tensor]:
    found = {f"output {index}": output.detach().clone() for index, output in enumerate(outputs)}
    found |= {name: value.detach().clone() for name, value in whole_state(model, optimizer).items()}
    for name, weight in model.named_parameters():
        for each in getattr(weight, "_in_backward_optimizers", ()):
            state = each.state.get(weight, {}).items()
            found |= {f"{name}, {key}": value.clone() for key, value in state if type(value) is Tensor}
    return found


def _difference(eager: States, compiled: States, tolerance: float = 0.0) -> str:
    """Returns the first difference of two runs; nothing if no number differs by more than ``tolerance``."""
    for step, (before, after) in enumerate(zip(eager, compiled, strict=True)):
        if before.keys() != after.keys():
            names = ", ".join(sorted(before.keys() ^ after.keys()))
            return f"step {step}: other tensors: {names}"
        for name, value in before.items():
            if not torch.equal(value, after[name]):
                most = (value.double() - after[name].double()).abs().max().item()
                if not most <= tolerance:
                    return f"step {step}: {name} by {most:.1e}"
    return ""


def _text(error: Exception) -> str:
    lines = [line for line in f"{error}".splitlines() if line.strip()] or [type(error).__name__]
    name = "" if isinstance(error, GraphPassesError) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}"[:300]
