"""One way to run a parity experiment: train every variant of every case, judge each comparison, print one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch.distributed as dist
from rich.console import Console

from experiments.harness.verdict import (
    Comparison,
    Verdict,
    is_complete,
    judge,
    run_path,
    summary,
    verdict_table,
)
from graphpasses.parity.launch import RankError, run_ranks
from graphpasses.terminal import make_console

__all__ = [
    "Case",
    "ParityExperiment",
    "RunCounter",
    "Runs",
    "TrainedRun",
    "failure_of",
    "judge_all",
    "num_runs",
    "train_on_rank",
]


class Case(Protocol):
    """What is trained, in which ways, and what is compared."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def variants(self) -> tuple[str, ...]:
        """The ways in which it is trained, the baseline's first; each makes a run file."""

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The rows of the table."""


def num_runs(cases: Iterable[Case]) -> int:
    """Returns the number of runs that cases have."""
    return sum(len(case.variants) for case in cases)


@dataclass(frozen=True)
class TrainedRun:
    """A run that ended.

    Args:
        case: name of the case.
        variant: how it was trained.
        failure: what ended the run early; empty if nothing did.
        facts: what an experiment's table says of the run besides; picklable, None if the run's launch failed.
        seconds: that it took.
    """

    case: str
    variant: str
    failure: str = ""
    facts: Any = None
    seconds: float = 0.0


@dataclass
class RunCounter:
    """Counts the runs that are done and prints a line for each.

    Args:
        num_runs: how many there will be.
        num_done: how many are done.
        start: ``time.monotonic()`` when the experiment began.
    """

    num_runs: int
    num_done: int = 0
    start: float = field(default_factory=time.monotonic)

    def add(self, run: TrainedRun, console: Console) -> None:
        """Counts a run and prints, e.g., ``[ 3/52]   12 s  gpt-fsdp-bf16: eager``."""
        self.num_done += 1
        seconds = time.monotonic() - self.start
        name = f"{run.case}: {run.variant}{' FAILED' * bool(run.failure)}"
        console.print(f"\\[{self.num_done:2d}/{self.num_runs}] {seconds:4.0f} s  {name}")


Runs = Mapping[tuple[str, str], TrainedRun]
"""How runs ended, by case and variant."""

TrainCases = Callable[..., Iterator[TrainedRun]]
"""Called on every rank as ``train(cases, num_steps, folder, *args)``; writes the run files."""


class ParityExperiment:
    """The frame of one command: its beginning, its launches, its table and its exit code.

    Args:
        title: of the table.
        cases: what is trained.
        num_steps: optimizer steps of each run.
        folder: for the run files. Files of these runs that an earlier command left are removed at once, so that
            nothing of an interrupted command is ever judged.
        columns: headers of further columns of the table.
        keep: run files that are complete and stay.
        counter: of a command that this experiment is a part of.
    """

    def __init__(
        self,
        title: str,
        cases: Sequence[Case],
        num_steps: int,
        folder: Path,
        columns: Sequence[str] = (),
        keep: Collection[Path] = (),
        counter: RunCounter | None = None,
    ) -> None:
        self.title, self.num_steps, self.folder, self.columns = title, num_steps, folder, columns
        self.console = make_console()
        self.runs: dict[tuple[str, str], TrainedRun] = {}
        paths = [run_path(folder, case.name, variant) for case in cases for variant in case.variants]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path not in keep:
                path.unlink(missing_ok=True)
        self.counter = counter or RunCounter(len(paths))
        if counter is None:
            self.console.print(f"{len(cases)} cases, {len(paths)} runs of {num_steps} steps")

    def train(self, train: TrainCases, cases: Sequence[Case], num_ranks: int, *args: Any, **launch: Any) -> None:
        """Trains cases that share processes, and adds to :attr:`runs` how they ended.

        A rank that fails ends the launch; its traceback is printed, and the runs that are not complete failed.

        Args:
            train: called on every rank; see :data:`TrainCases`.
            cases: what to train.
            num_ranks: number of processes.
            args: further arguments of ``train``.
            launch: options of :func:`graphpasses.parity.launch.run_ranks`.
        """
        given = (train, self.counter, cases, self.num_steps, self.folder.absolute(), *args)
        try:
            runs: list[TrainedRun] = run_ranks(train_on_rank, num_ranks, *given, timeout=3600.0, **launch)[0]
        except RankError as error:
            self.console.print(str(error), markup=False)
            reason = str(error).strip().splitlines()[-1]
            runs = [self._run_of_a_failed_launch(each.name, name, reason) for each in cases for name in each.variants]
        self.counter.num_done += len(runs)
        self.runs.update({(run.case, run.variant): run for run in runs})

    def _run_of_a_failed_launch(self, case: str, variant: str, reason: str) -> TrainedRun:
        return TrainedRun(case, variant, "" if is_complete(run_path(self.folder, case, variant)) else reason)

    def conclude(self, verdicts: Sequence[Verdict]) -> int:
        """Prints the table and how many comparisons are wrong.

        Args:
            verdicts: the rows.

        Returns:
            The exit code: 0 if all rows are as they must be, else 1.
        """
        seconds = time.monotonic() - self.counter.start
        self.console.print(verdict_table(self.title, verdicts, *self.columns))
        self.console.print(f"{summary(verdicts)}; {seconds:.0f} s")
        return int(any(verdict.status != "ok" for verdict in verdicts))


def train_on_rank(train: TrainCases, counter: RunCounter, *args: Any) -> list[TrainedRun]:
    """Trains on this rank; rank 0 prints which runs are done.

    Args:
        train: see :data:`TrainCases`.
        counter: knows what is done already.
        args: of ``train``.

    Returns:
        The runs.
    """
    console = make_console() if dist.get_rank() == 0 else None
    runs, start = [], time.monotonic()
    for run in train(*args):
        end = time.monotonic()
        runs.append(replace(run, seconds=end - start))
        start = end
        if console is not None:
            counter.add(run, console)
    return runs


def judge_all(
    cases: Sequence[Case], folder: Path, num_steps: int, runs: Runs = MappingProxyType({})
) -> list[Verdict]:
    """Judges every comparison of every case.

    Args:
        cases: what was trained.
        folder: where the run files are.
        num_steps: see :func:`experiments.harness.verdict.judge`.
        runs: how they ended, if that is known.
    """
    return [
        judge(case.name, row, folder, num_steps, failure_of(case, row, runs))
        for case in cases
        for row in case.comparisons
    ]


def failure_of(case: Case, row: Comparison, runs: Runs) -> str:
    """Returns why one of the runs that a row compares ended early; empty if none did.

    Args:
        case: what was trained.
        row: of its table.
        runs: how they ended.
    """
    both = (runs.get((case.name, variant)) for variant in (row.variant, row.other))
    return next((run.failure for run in both if run is not None and run.failure), "")
