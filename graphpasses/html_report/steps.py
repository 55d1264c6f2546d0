"""The steps of runs as drawings: a strip of equality, and the losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphpasses.parity.compare import StepDifference
from graphpasses.parity.run_file import Loss, Run

_MAX_CELLS = 400


@dataclass(frozen=True)
class Cell:
    """A step of a strip, or several."""

    state: str  # ``"equal"`` or ``"differs"``
    text: str  # the tooltip


@dataclass(frozen=True)
class Line:
    """The losses of a run in a chart."""

    name: str
    stretches: tuple[str, ...]  # points as SVG takes them, of steps in a row whose loss is finite
    first_lost: int | None  # first step whose loss is not; None if all are


@dataclass(frozen=True)
class Chart:
    """Losses in a field of 1000 by 200."""

    lines: tuple[Line, ...]
    lowest: float  # loss at the bottom
    highest: float  # loss at the top
    first: int  # step at the left
    last: int  # step at the right


def draw_strip(differences: Sequence[StepDifference]) -> tuple[Cell, ...]:
    """Draws which steps are equal; of very many steps several share a cell, which is equal if all of them are."""
    size = math.ceil(len(differences) / _MAX_CELLS)
    return tuple(_cell(differences[start : start + size]) for start in range(0, len(differences), size))


def _cell(steps: Sequence[StepDifference]) -> Cell:
    name = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
    if not any(steps):
        return Cell("equal", f"{name}: equal")
    num_gradients = max(len(step.gradients or ()) for step in steps)
    num_weights = max(len(step.weights) for step in steps)
    loss = ", and the loss" if any(step.loss for step in steps) else ""
    up_to = "up to " if len(steps) > 1 else ""
    return Cell("differs", f"{name}: {up_to}{num_gradients} gradients and {num_weights} weights differ{loss}")


def draw_losses(runs: Sequence[tuple[str, Run]]) -> Chart | None:
    """Draws the mean loss of all ranks, step by step; None if fewer than two steps have one."""
    losses = {name: {step.step: _mean(step.loss) for step in run.steps if step.loss} for name, run in runs}
    values = [value for its in losses.values() for value in its.values() if math.isfinite(value)]
    steps = sorted({step for its in losses.values() for step, value in its.items() if math.isfinite(value)})
    if len(steps) < 2:
        return None
    lowest, highest = min(values), max(values)
    across, up = 1000 / (steps[-1] - steps[0]), 200 / (highest - lowest or 1.0)
    lines = []
    for name, its in losses.items():
        stretches = [
            " ".join(f"{across * (step - steps[0]):.1f},{200 - up * (value - lowest):.1f}" for step, value in part)
            for is_finite, part in itertools.groupby(its.items(), lambda item: math.isfinite(item[1]))
            if is_finite
        ]
        first_lost = next((step for step, value in its.items() if not math.isfinite(value)), None)
        lines.append(Line(name, tuple(stretches), first_lost))
    return Chart(tuple(lines), lowest, highest, steps[0], steps[-1])


def _mean(loss: Loss) -> float:
    if not loss.dtype.startswith(("float", "bfloat")):  # a complex one has no place on a line
        return math.nan
    return sum(float(value) / len(loss.values) for value in loss.values)
