"""Trains a cell eagerly and compiled on this rank, and says how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.optim.keyed import KeyedOptimizer

import graphpasses as gp
from experiments.torchrec_parity.state import whole_state
from experiments.torchrec_support.cells import Cell
from experiments.torchrec_support.models import build, make_batches
from experiments.torchrec_support.outcome import Outcome
from graphpasses.errors import GraphPassesError

__all__ = ["train_cells"]

Compile = Callable[[nn.Module], Any]
States = list[dict[str, Tensor]]


def train_cells(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Trains cells; all ranks call it with the same arguments.

    Args:
        cells: what to try.

    Yields:
        Each cell with what came of it, the same on all ranks.
    """
    together = dist.new_group(timeout=timedelta(minutes=1))
    for cell in cells:
        eager, failure = _try(cell, lambda model: model, together)
        if failure is not None:
            yield cell, Outcome("eager cannot", _text(failure))
            continue
        report = gp.CompileReport()
        compiled, failure = _try(cell, partial(gp.compile, inner="aot_eager", report=report), together)
        torch._dynamo.reset()
        if failure is not None:
            kind = "refused" if isinstance(failure, GraphPassesError) else "fails"
            yield cell, Outcome(kind, _text(failure))
            continue
        yield cell, _compare(eager, compiled, report.num_graphs)


def _try(cell: Cell, compile: Compile, together: dist.ProcessGroup) -> tuple[States, Exception | None]:
    """Trains, and returns the states after each step; or the failure of the first rank that has one."""
    states: States = []
    failure: Exception | None = None
    try:
        states = list(_train(cell, compile))
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


def _train(cell: Cell, compile: Compile) -> Iterator[dict[str, Tensor]]:
    model, optimizer = build(cell)
    batches = make_batches(cell)
    run = compile(model)
    if not cell.pipeline:
        for batch in batches:
            optimizer.zero_grad()
            loss, prediction = run(batch)
            loss.backward()
            optimizer.step()
            yield _state(model, optimizer, loss, prediction)
        return
    pipeline = getattr(train_pipelines, cell.pipeline)(run, optimizer, torch.device("cpu"))
    steps = iter(batches)
    for _ in batches:
        yield _state(model, optimizer, pipeline.progress(steps))


def _state(model: nn.Module, optimizer: KeyedOptimizer, *outputs: Tensor) -> dict[str, Tensor]:
    found = {f"output {index}": output.detach().clone() for index, output in enumerate(outputs)}
    return found | {name: value.detach().clone() for name, value in whole_state(model, optimizer).items()}


def _compare(eager: States, compiled: States, num_graphs: int) -> Outcome:
    graphs = "" if num_graphs == 1 else f"{num_graphs} graphs"
    for step, (before, after) in enumerate(zip(eager, compiled, strict=True)):
        if before.keys() != after.keys():
            names = ", ".join(sorted(before.keys() ^ after.keys()))
            return Outcome("differs", f"step {step}: other tensors: {names}")
        for name, value in before.items():
            if not torch.equal(value, after[name]):
                most = (value.double() - after[name].double()).abs().max().item()
                return Outcome("differs", f"step {step}: {name} by {most:.1e}")
    return Outcome("bits", graphs)


def _text(error: Exception) -> str:
    lines = [line for line in f"{error}".splitlines() if line.strip()] or [type(error).__name__]
    name = "" if isinstance(error, GraphPassesError) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}"[:200]
