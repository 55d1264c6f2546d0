"""Runs on simulated clusters, side by side in processes of their own; complete ones are not repeated."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.harness.parity import RunCounter, TrainedRun
from experiments.scale_parity.cases import Case
from graphpasses.errors import RunFileError
from graphpasses.parity import read_run
from graphpasses.simulate import Topology
from graphpasses.terminal import make_console

__all__ = ["SimulatedRun", "play_all"]


@dataclass(frozen=True)
class SimulatedRun:
    """One run of the experiment.

    Args:
        case: what is trained, and where.
        variant: how.
        num_steps: its optimizer steps.
        path: its run file.
    """

    case: Case
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


def play_all(runs: Sequence[SimulatedRun], num_workers: int, counter: RunCounter) -> None:
    """Plays runs in processes of their own and shows how far they are.

    Args:
        runs: what to play.
        num_workers: processes.
        counter: counts the runs that are done.
    """
    console = make_console()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.scale_parity.train"])
    steps_done: Queue[int] = context.Queue()
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(num_workers, context, _begin, (steps_done,), max_tasks_per_child=1) as pool,
    ):
        task = progress.add_task("steps", total=sum(run.num_steps for run in runs))
        futures = {pool.submit(_play, run): run for run in runs}
        while futures:
            done, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
            while not steps_done.empty():
                progress.advance(task, steps_done.get())
            for future in done:
                future.result()
                run = futures.pop(future)
                counter.add(TrainedRun(run.case.name, run.variant), progress.console)


_steps_done: Queue[int] | None = None


def _begin(steps_done: Queue[int]) -> None:
    global _steps_done
    _steps_done = steps_done


def _report_step(num_steps: int) -> None:
    if _steps_done is not None:
        _steps_done.put(1)


def _play(run: SimulatedRun) -> None:
    from experiments.scale_parity.train import train

    train(run.case, run.variant, run.num_steps, run.path, _report_step)
