"""One way to run a parity experiment: train every variant of every case, judge each comparison, print one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from rich.console import Console

from experiments.harness.verdict import Comparison, Verdict, judge, run_path, summary, verdict_table
from graphpasses.parity.launch import run_ranks
from graphpasses.terminal import make_console

__all__ = ["Case", "ParityExperiment", "RunCounter", "TrainedRun", "judge_all", "train_on_rank"]


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


@dataclass(frozen=True)
class TrainedRun:
    """A run that ended.

    Args:
        case: name of the case.
        variant: how it was trained.
        failure: what ended the run early; empty if nothing did.
        facts: what an experiment's table says of the run besides; picklable.
    """

    case: str
    variant: str
    failure: str = ""
    facts: Any = None


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
    """

    def __init__(
        self,
        title: str,
        cases: Sequence[Case],
        num_steps: int,
        folder: Path,
        columns: Sequence[str] = (),
        keep: Collection[Path] = (),
    ) -> None:
        self.title, self.num_steps, self.folder, self.columns = title, num_steps, folder, columns
        self.console = make_console()
        paths = [run_path(folder, case.name, variant) for case in cases for variant in case.variants]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path not in keep:
                path.unlink(missing_ok=True)
        self.counter = RunCounter(len(paths))
        self.console.print(f"{len(cases)} cases, {self.counter.num_runs} runs of {num_steps} steps")

    def train(
        self, train: TrainCases, cases: Sequence[Case], num_ranks: int, *args: Any, **launch: Any
    ) -> list[TrainedRun]:
        """Trains cases that share processes.

        Args:
            train: called on every rank; see :data:`TrainCases`.
            cases: what to train.
            num_ranks: number of processes.
            args: further arguments of ``train``.
            launch: options of :func:`graphpasses.parity.launch.run_ranks`.

        Returns:
            The runs, as rank 0 has seen them.
        """
        given = (train, self.counter, cases, self.num_steps, self.folder.absolute(), *args)
        runs: list[TrainedRun] = run_ranks(train_on_rank, num_ranks, *given, timeout=3600.0, **launch)[0]
        self.counter.num_done += len(runs)
        return runs

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
    runs = []
    for run in train(*args):
        runs.append(run)
        if console is not None:
            counter.add(run, console)
    return runs


def judge_all(cases: Sequence[Case], folder: Path, num_steps: int) -> list[Verdict]:
    """Judges every comparison of every case.

    Args:
        cases: what was trained.
        folder: where the run files are.
        num_steps: see :func:`experiments.harness.verdict.judge`.
    """
    return [judge(case.name, row, folder, num_steps) for case in cases for row in case.comparisons]
