"""Command line: ``python -m experiments.architectures --help``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tyro

from experiments.architectures.cases import CASES
from experiments.architectures.run import COLUMNS, train_and_judge
from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select


def main(
    steps: int = 5,
    out: Path = Path("runs/architectures"),
    only: Only = "",
    workers: int = os.cpu_count() or 1,
) -> int:
    """Trains models of transformers with eager FSDP2 and as a graph, on a simulated cluster of two nodes.

    A graph must have eager's bits after every step, or be refused; the controls must not have them. Nothing is
    downloaded. Exit code 0 if every row is as it must be, 1 if not, 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the architectures whose name contains this, e.g. "llama".
        workers: processes, each of which plays a run at a time.
    """
    selected = select(CASES, only)
    if not selected:
        return 2
    title = "Architectures of transformers: graph against eager FSDP2"
    experiment = ParityExperiment(title, selected, steps, out, COLUMNS)
    return experiment.conclude(train_and_judge(experiment, selected, workers))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
