"""Command line: ``python -m experiments.fsdp_parity --help``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments._parity.select import select
from experiments._parity.verdict import Must, Verdict, compare, run_path, verdict_table
from experiments.fsdp_parity.cases import CASES, Case
from experiments.fsdp_parity.train import train_cases
from graphpasses.parity.launch import run_ranks

PRELOAD = (
    "torch.distributed.fsdp",
    "torchtitan.experiments.graph_trainer.make_fx_tracer",
    "graphpasses.simulate",
)


def main(
    steps: int = 25,
    out: Path = Path("runs/fsdp_parity"),
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
) -> int:
    """Trains small language models on 4 processes: eagerly with FSDP2, captured, and compiled with our passes.

    Both add in the order of NCCL's rings on 2 nodes of 2 GPUs. The default pipeline must give eager's bits at
    every step, every control must not. Exit code 0 if so, else 1.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases:
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    num_runs = sum(1 + len(case.variants) for case in cases)
    console.print(f"{len(cases)} cases, {num_runs} runs of {steps} steps, 4 processes")
    start = time.monotonic()
    run_ranks(
        train_cases,
        4,
        cases,
        steps,
        out,
        backend="nccl_sim",
        preload=PRELOAD,
        timeout=3600.0,
    )
    table, num_wrong = judge(cases, out, steps)
    console.print(table)
    console.print(
        f"{num_wrong} of {num_runs - len(cases)} comparisons are wrong; {time.monotonic() - start:.0f} s"
    )
    return 1 if num_wrong else 0


def judge(cases: Sequence[Case], folder: Path, num_steps: int) -> tuple[Table, int]:
    """Compares every recorded variant with eager's run.

    Args:
        cases: what was trained.
        folder: where the run files are.
        num_steps: steps that each run must have.

    Returns:
        A table with a row per variant, and how many of them are not as they must be.
    """
    verdicts = []
    for case in cases:
        for variant in case.variants:
            must: Must = "differ" if variant in case.controls else "equal"
            eager, other = (run_path(folder, case.name, name) for name in ("eager", variant))
            verdicts.append(Verdict(case.name, variant, must, *compare(eager, other, num_steps, must)))
    table = verdict_table("Captured step against eager FSDP2", verdicts)
    return table, sum(not verdict.right for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
