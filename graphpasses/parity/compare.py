"""Where two recorded runs begin to differ: the step, the tensors, and what differs first. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from graphpasses.errors import CompareError
from graphpasses.parity.run_file import Loss, Run, StepRecord
from graphpasses.text import some

if TYPE_CHECKING:
    from graphpasses.fsdp.layout import Layout
    from graphpasses.fsdp.layout_diff import Move

__all__ = [
    "Comparison",
    "Divergence",
    "StepDifference",
    "compare_runs",
    "step_differences",
]


@dataclass(frozen=True)
class StepDifference:
    """What differs in one step of two runs; true if anything does.

    Args:
        step: its number.
        loss: whether the losses differ; None if they could not be compared.
        gradients: FQNs whose gradients differ; None if they could not be compared.
        weights: FQNs whose weights differ.
    """

    step: int
    loss: bool | None
    gradients: tuple[str, ...] | None
    weights: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.loss or self.gradients or self.weights)


@dataclass(frozen=True)
class Divergence(StepDifference):
    """The first step in which two runs differ.

    Args:
        step: see :class:`StepDifference`.
        loss: see :class:`StepDifference`.
        gradients: see :class:`StepDifference`.
        weights: see :class:`StepDifference`.
        losses: each run's losses, if both recorded any.
        moves: where the layouts put the differing parameters' gradients, if the places differ; empty without layouts.
    """

    losses: tuple[Loss, Loss] | None
    moves: tuple[Move, ...]

    @property
    def first(self) -> Literal["loss", "gradients", "weights"]:
        """What differs first, in the order in which a step computes the loss, the gradients and the weights."""
        return "loss" if self.loss else "gradients" if self.gradients else "weights"


@dataclass(frozen=True)
class Comparison:
    """What comparing two runs found.

    Args:
        a: the first run.
        b: the second run.
        num_steps: number of steps that both have.
        divergence: the first of them that differs; None if all are equal.
        notes: what was not compared, and why.
    """

    a: Run
    b: Run
    num_steps: int
    divergence: Divergence | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Literal["equal", "different", "not compared"]:
        """Whether the runs are equal, or differ; "not compared" if a run was cut short before a step that differs."""
        if self.divergence is not None:
            return "different"
        return "equal" if self.a.complete and self.b.complete else "not compared"

    @property
    def equal(self) -> bool:
        """Whether both runs ended in order and all common steps are equal."""
        return self.verdict == "equal"


def compare_runs(a: Run, b: Run) -> Comparison:
    """Finds the first step in which two runs differ, and what differs there.

    The runs may have different numbers of ranks, since hashes do not depend on sharding.

    Args:
        a: a run.
        b: another run of the same model.

    Returns:
        The first difference, or that there is none in the steps that both have.

    Raises:
        CompareError: torch versions or seeds differ, the runs have other tensors, or no step in common.

    Example:
        >>> from graphpasses.parity import ParityRecorder, read_run
        >>> import tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> with ParityRecorder(path) as recorder:
        ...     recorder.record(0, 1.0, torch.nn.Linear(2, 2))
        >>> compare_runs(read_run(path), read_run(path)).equal
        True
    """
    _check_comparable(a, b)
    common = _common_steps(a, b)
    notes = _notes(a, b, [record.step for record, _ in common])
    same_ranks = a.header.world_size == b.header.world_size
    skipped: dict[str, int] = {}
    divergence = None
    for x, y in common:
        if difference := _difference(x, y, same_ranks, skipped):
            divergence = _divergence(x, y, difference, a.header.layouts, b.header.layouts)
            break
    notes += [f"{reason}, first in step {step}" for reason, step in skipped.items()]
    return Comparison(a, b, len(common), divergence, tuple(notes))


def step_differences(a: Run, b: Run) -> list[StepDifference]:
    """Says for every step that two runs have in common what differs in it.

    Args:
        a: a run.
        b: another run of the same model.

    Raises:
        CompareError: see :func:`compare_runs`.

    Example:
        >>> from graphpasses.parity import ParityRecorder, read_run
        >>> import tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> with ParityRecorder(path) as recorder:
        ...     recorder.record(0, 1.0, torch.nn.Linear(2, 2))
        >>> step_differences(read_run(path), read_run(path))
        [StepDifference(step=0, loss=False, gradients=None, weights=())]
    """
    _check_comparable(a, b)
    same_ranks = a.header.world_size == b.header.world_size
    return [_difference(x, y, same_ranks, {}) for x, y in _common_steps(a, b)]


def _common_steps(a: Run, b: Run) -> list[tuple[StepRecord, StepRecord]]:
    steps_b = {record.step: record for record in b.steps}
    common = [(record, steps_b[record.step]) for record in a.steps if record.step in steps_b]
    if not common:
        raise CompareError(f"the runs have no step in common: A has {_steps(a)}, B has {_steps(b)}")
    return common


def _check_comparable(a: Run, b: Run) -> None:
    if a.header.torch != b.header.torch:
        raise CompareError(
            f"the runs used torch {a.header.torch} and torch {b.header.torch}: "
            "bits are only comparable on one version; record both on the same"
        )
    if a.header.seed != b.header.seed:
        raise CompareError(
            f"the runs began with seeds {a.header.seed} and {b.header.seed}: record both with one"
        )


def _difference(x: StepRecord, y: StepRecord, same_ranks: bool, skipped: dict[str, int]) -> StepDifference:
    """Compares one step; notes in ``skipped`` what could not be."""
    weights = _differing("tensors", x.step, x.weights, y.weights)
    gradients: tuple[str, ...] | None = None
    has_gradients = [any(record.gradients.values()) for record in (x, y)]
    if all(has_gradients):
        gradients = _differing("gradients", x.step, x.gradients, y.gradients)
    elif any(has_gradients):
        only = "AB"[has_gradients.index(True)]
        skipped.setdefault(f"gradients are not compared where only run {only} has them", x.step)
    loss: bool | None = None
    if x.loss and y.loss:
        if same_ranks:
            loss = (x.loss.dtype, x.loss.bits) != (y.loss.dtype, y.loss.bits)
    elif x.loss or y.loss:
        skipped.setdefault(
            f"losses are not compared where only run {'A' if x.loss else 'B'} has them", x.step
        )
    return StepDifference(x.step, loss, gradients, weights)


def _divergence(
    x: StepRecord, y: StepRecord, difference: StepDifference, a: Layout | None, b: Layout | None
) -> Divergence:
    losses = (x.loss, y.loss) if x.loss and y.loss else None
    moves = _moves(dict.fromkeys((*(difference.gradients or ()), *difference.weights)), a, b)
    return Divergence(
        difference.step, difference.loss, difference.gradients, difference.weights, losses, moves
    )


def _differing(
    what: str, step: int, x: Mapping[str, str | None], y: Mapping[str, str | None]
) -> tuple[str, ...]:
    if x.keys() != y.keys():
        sides = [
            f"only {run} has {some(list(map(repr, sorted(names))), limit=3)}"
            for run, names in (("A", x.keys() - y.keys()), ("B", y.keys() - x.keys()))
            if names
        ]
        raise CompareError(f"the runs have other {what} in step {step}: {'; '.join(sides)}")
    return tuple(name for name in x if x[name] != y[name])


def _moves(fqns: Iterable[str], a: Layout | None, b: Layout | None) -> tuple[Move, ...]:
    """Returns what moved of some parameters' gradients, in the order of ``fqns``."""
    if a is None or b is None:
        return ()
    from graphpasses.fsdp.layout_diff import diff_layouts  # imports torch, as the layouts have

    moves: dict[str, list[Move]] = {}
    for move in diff_layouts(a, b).moves:
        moves.setdefault(move.fqn, []).append(move)
    return tuple(move for fqn in fqns for move in moves.get(fqn, ()))


def _notes(a: Run, b: Run, common: Sequence[int]) -> list[str]:
    notes = [
        f"run {name} was cut short: it has {_steps(run)}"
        for name, run in (("A", a), ("B", b))
        if not run.complete
    ]
    for name, run in (("A", a), ("B", b)):
        if num_other := len(run.steps) - len(common):
            notes.append(f"{num_other} steps of run {name} are not in the other and are not compared")
    if a.header.world_size != b.header.world_size:
        notes.append(
            f"the runs have {a.header.world_size} and {b.header.world_size} ranks: "
            "each rank's loss is not compared, weights and gradients are"
        )
    if (a.header.layouts is None) != (b.header.layouts is None):
        notes.append(f"only run {'B' if a.header.layouts is None else 'A'} recorded its bucket layouts")
    return notes


def _steps(run: Run) -> str:
    if not run.steps:
        return "no steps"
    return f"{len(run.steps)} steps, {run.steps[0].step} to {run.steps[-1].step}"
