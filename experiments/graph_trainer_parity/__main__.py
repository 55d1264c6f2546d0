"""Command line: ``python -m experiments.graph_trainer_parity --help``."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments._parity.select import select
from experiments._parity.verdict import Verdict, compare, run_path, verdict_table
from experiments.graph_trainer_parity.cases import CASES, CHECKPOINT_STEP, EAGER, RESTARTS, Case
from experiments.graph_trainer_parity.ranks import stores, train_cases
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.parity.launch import run_ranks


def main(
    steps: int = 25,
    out: Path = Path("runs/graph_trainer_parity"),
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
) -> int:
    """Trains torchtitan's debug models on 4 processes: with its eager trainer, and with graph_trainer.

    Both add in the order of NCCL's rings on 2 nodes of 2 GPUs. With our pass pipeline graph_trainer must have
    eager's losses, gradients, gradient norms and weights at every step; every control must not. Exit code 0 if so,
    else 1.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases:
        return 2
    if steps <= CHECKPOINT_STEP and any(case.has_restarts for case in cases):
        print(f"--steps {steps}: runs restart at step {CHECKPOINT_STEP}, so make it more", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    num_runs = sum(1 + len(case.variants) for case in cases)
    console.print(f"{len(cases)} cases, {num_runs} runs of {steps} steps, 4 processes")
    start, num_done = time.monotonic(), 0
    make_assets(out)
    for _, group in itertools.groupby(sorted(cases, key=lambda case: case.mesh), lambda case: case.mesh):
        members = tuple(group)
        num_here = sum(1 + len(case.variants) for case in members)
        done = (num_runs, num_done, start)
        with stores(num_here) as ports:
            run_ranks(train_cases, 4, members, steps, out.absolute(), ports, done, timeout=3600.0)
        num_done += num_here
    verdicts = [verdict for case in cases for verdict in judge(case, out, steps)]
    num_wrong = sum(not verdict.right for verdict in verdicts)
    console.print(verdict_table("graph_trainer against torchtitan's eager trainer", verdicts))
    console.print(f"{num_wrong} of {len(verdicts)} rows are wrong; {time.monotonic() - start:.0f} s")
    return 1 if num_wrong else 0


def judge(case: Case, folder: Path, num_steps: int) -> list[Verdict]:
    """Compares every recorded variant with eager's run.

    Args:
        case: what was trained.
        folder: where the run files are.
        num_steps: steps that each run must have, but those from a checkpoint, which have what is left.
    """
    verdicts = []
    for variant, must in case.variants:
        num_expected = num_steps - CHECKPOINT_STEP if variant in RESTARTS else num_steps
        eager, other = (run_path(folder, case.name, name) for name in (EAGER, variant))
        verdicts.append(Verdict(case.name, variant, must, *compare(eager, other, num_expected, must)))
    return verdicts


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
