"""The steps of runs as drawings: a strip of equality, and the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphpasses.parity.compare import StepDifference
from graphpasses.parity.run_file import Run

__all__ = ["Cell", "Chart", "Line", "draw_losses", "draw_strip"]

_MAX_CELLS = 400


@dataclass(frozen=True)
class Cell:
    """A step of a strip, or several.

    Args:
        state: ``"equal"`` or ``"differs"``.
        text: what hovering tells.
    """

    state: str
    text: str


@dataclass(frozen=True)
class Line:
    """The losses of a run in a chart.

    Args:
        name: of the run.
        points: as SVG takes them.
    """

    name: str
    points: str


@dataclass(frozen=True)
class Chart:
    """Losses in a field of 1000 by 200.

    Args:
        lines: of the runs.
        lowest: loss at the bottom.
        highest: loss at the top.
        first: step at the left.
        last: step at the right.
    """

    lines: tuple[Line, ...]
    lowest: float
    highest: float
    first: int
    last: int


def draw_strip(differences: Sequence[StepDifference]) -> tuple[Cell, ...]:
    """Draws which steps are equal; of very many steps several share a cell, which is equal if all of them are.

    Args:
        differences: of all common steps.
    """
    size = math.ceil(len(differences) / _MAX_CELLS)
    return tuple(_cell(differences[start : start + size]) for start in range(0, len(differences), size))


def _cell(steps: Sequence[StepDifference]) -> Cell:
    name = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
    worst = max(steps, key=lambda step: (bool(step), len(step.weights), len(step.gradients)))
    if not worst:
        return Cell("equal", f"{name}: equal")
    counts = f"{len(worst.gradients)} gradients and {len(worst.weights)} weights differ"
    loss = ", and the loss" if worst.loss else ""
    return Cell("differs", f"{name}: {'up to ' if len(steps) > 1 else ''}{counts}{loss}")


def draw_losses(runs: Sequence[tuple[str, Run]]) -> Chart | None:
    """Draws the mean loss of all ranks, step by step; None if fewer than two steps have one.

    Args:
        runs: each with its name.
    """
    losses = {
        name: {step.step: _mean(step.loss.values) for step in run.steps if step.loss} for name, run in runs
    }
    finite = {
        name: {step: value for step, value in its.items() if math.isfinite(value)}
        for name, its in losses.items()
    }
    steps = sorted({step for its in finite.values() for step in its})
    if len(steps) < 2:
        return None
    values = [value for its in finite.values() for value in its.values()]
    lowest, highest = min(values), max(values)
    lines = tuple(
        Line(
            name,
            " ".join(
                f"{1000 * (step - steps[0]) / (steps[-1] - steps[0]):.1f},"
                f"{200 - 200 * (value - lowest) / (highest - lowest or 1.0):.1f}"
                for step, value in its.items()
            ),
        )
        for name, its in finite.items()
    )
    return Chart(lines, lowest, highest, steps[0], steps[-1])


def _mean(values: Sequence[str]) -> float:
    return math.fsum(map(float, values)) / len(values)
