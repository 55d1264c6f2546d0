"""Runs on simulated clusters, side by side in processes of their own; complete ones are not repeated."""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.harness.parity import RunCounter, TrainedRun
from graphpasses.errors import RunFileError
from graphpasses.parity import read_run
from graphpasses.parity.launch import end_with_caller
from graphpasses.simulate import Topology
from graphpasses.terminal import make_console

__all__ = ["Play", "SimulatedCase", "SimulatedRun", "play_all"]


class SimulatedCase(Protocol):
    """What is trained, and where."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def topology(self) -> dict[str, Any]:
        """Arguments of the cluster's :class:`~graphpasses.simulate.Topology`."""


C = TypeVar("C", bound=SimulatedCase)


@dataclass(frozen=True)
class SimulatedRun(Generic[C]):
    """One run of an experiment.

    Args:
        case: what is trained, and where.
        variant: how.
        num_steps: its optimizer steps.
        path: its run file.
    """

    case: C
    variant: str
    num_steps: int
    path: Path

    def is_done(self) -> bool:
        """Whether an earlier call of the command has played it to its end."""
        try:
            run = read_run(self.path)
        except RunFileError:
            return False
        topology = json.loads(json.dumps(asdict(Topology(**self.case.topology))))
        header = run.header
        is_same = (header.model, header.run, header.topology) == (self.case.name, self.variant, topology)
        return is_same and run.complete and len(run.steps) == self.num_steps


Play = Callable[[SimulatedRun[C], Callable[[int], object]], TrainedRun]
"""Plays a run in this process, writes its run file and calls its second argument after each step."""


def play_all(
    runs: Sequence[SimulatedRun[C]], play: Play[C], num_workers: int, counter: RunCounter
) -> list[TrainedRun]:
    """Plays runs in processes of their own and shows how far they are.

    Args:
        runs: what to play; those that take long are best first.
        play: a function of a module, which the processes import once for all.
        num_workers: processes.
        counter: counts the runs that are done.

    Returns:
        The runs, as they ended. Of one that raised, or whose process died, the traceback is printed, and it failed.
    """
    console = make_console()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([play.__module__])
    steps_done: Queue[int] = context.Queue()
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    trained = []
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(num_workers, context, _begin, (steps_done,), max_tasks_per_child=1) as pool,
    ):
        task = progress.add_task("steps", total=sum(run.num_steps for run in runs))
        futures = {pool.submit(_play, play, run): run for run in runs}
        while futures:
            done, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
            while not steps_done.empty():
                progress.advance(task, steps_done.get())
            for future in done:
                run = futures.pop(future)
                if error := future.exception():
                    progress.console.print("".join(traceback.format_exception(error)), markup=False)
                    failure = f"{type(error).__name__}: {error}"
                    trained.append(TrainedRun(run.case.name, run.variant, failure))
                else:
                    trained.append(future.result())
                counter.add(trained[-1], progress.console)
    return trained


_steps_done: Queue[int] | None = None


def _begin(steps_done: Queue[int]) -> None:
    global _steps_done
    _steps_done = steps_done
    end_with_caller()


def _report_step(num_steps: int) -> None:
    if _steps_done is not None:
        _steps_done.put(1)


def _play(play: Play[C], run: SimulatedRun[C]) -> TrainedRun:
    start = time.monotonic()
    trained = play(run, _report_step)
    return replace(trained, seconds=time.monotonic() - start)
