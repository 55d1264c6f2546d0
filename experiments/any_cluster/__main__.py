"""Command line: ``python -m experiments.any_cluster --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.any_cluster.cases import CASES
from experiments.any_cluster.run import train_and_judge
from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select


def main(steps: int = 25, out: Path = Path("runs/any_cluster"), only: Only = "") -> int:
    """Trains language models on 1 to 8 processes, with FSDP2 and HSDP, eagerly and captured, and by torchtitan.

    Gradients are added in one binary tree over all microbatches, wherever they are. All runs must have the same
    weights and gradients after every step, also one that goes on with other ranks from a checkpoint; every control
    must not. Exit code 0 if so, else 1; 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run, at least 3.
        out: folder for the run files and checkpoints; look into any two with `graphpasses compare A B --allow ranks`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases or steps < 3:
        return 2
    experiment = ParityExperiment("The same bits on any cluster", cases, steps, out)
    return experiment.conclude(train_and_judge(experiment, cases))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
