"""Command line: ``python -m experiments.parity --help``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import tyro

from experiments.harness.parity import ParityExperiment, RunCounter, num_runs
from experiments.harness.select import Only, select
from experiments.harness.verdict import summary
from experiments.parity.parts import PARTS, Part
from experiments.parity.table import Rows, make_table
from graphpasses.terminal import make_console


def main(out: Path = Path("runs/parity"), only: Only = "") -> int:
    """Trains a few models of every kind both ways, eagerly and as a graph, and compares every bit, in ten minutes.

    They are cases of the experiments fsdp_parity, architectures, graph_trainer_parity and torchrec_parity, which have
    many more; `make parity-full` runs all. Exit code 0 if every row is as it must be, else 1; 2 for wrong arguments.

    Args:
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only what has this text in its model or sharding, e.g. "Llama" or "HSDP".
    """
    possible = [part for part in PARTS if part.is_possible]
    selected = select([each for part in possible for each in part.shown], only)
    if not selected:
        return 2
    parts = [replace(part, shown=tuple(each for each in part.shown if each in selected)) for part in possible]
    console = make_console()
    counter = RunCounter(sum(num_runs(part.cases) for part in parts))
    console.print(f"{len(selected)} cases, {counter.num_runs} runs")
    rows = [each for part in parts if part.shown for each in _train(part, out / part.folder, counter)]
    verdicts = [verdict for each in rows for verdict in each.verdicts]
    console.print(make_table(rows))
    for part in PARTS:
        if not part.is_possible:
            console.print(f"{part.needs} is not installed: its {len(part.shown)} cases are left out")
    console.print(f"run files: {out}; look into any two with graphpasses compare A B")
    console.print(f"{summary(verdicts)}; {time.monotonic() - counter.start:.0f} s")
    return int(any(verdict.status != "ok" for verdict in verdicts))


def _train(part: Part, folder: Path, counter: RunCounter) -> list[Rows]:
    experiment = ParityExperiment("", part.cases, part.num_steps, folder, counter=counter)
    verdicts = part.train_and_judge(experiment, part.cases)
    seconds = {shown.case.name: 0.0 for shown in part.shown}
    for run in experiment.runs.values():
        seconds[run.case] += run.seconds
    return [
        Rows(
            shown,
            part.num_steps,
            [verdict for verdict in verdicts if verdict.case == shown.case.name],
            seconds[shown.case.name],
        )
        for shown in part.shown
    ]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
