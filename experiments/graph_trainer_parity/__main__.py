"""Command line: ``python -m experiments.graph_trainer_parity --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.graph_trainer_parity.cases import CASES, CHECKPOINT_STEP
from experiments.graph_trainer_parity.run import train_and_judge
from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select


def main(steps: int = 25, out: Path = Path("runs/graph_trainer_parity"), only: Only = "") -> int:
    """Trains torchtitan's debug models on 4 processes: with its eager trainer, and with graph_trainer.

    Both add in the order of NCCL's rings on 2 nodes of 2 GPUs. With our pass pipeline graph_trainer must have
    eager's losses, gradients, gradient norms and weights at every step; every control must not. Exit code 0 if so,
    else 1; 2 for wrong arguments.

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
    experiment = ParityExperiment("graph_trainer against torchtitan's eager trainer", cases, steps, out)
    return experiment.conclude(train_and_judge(experiment, cases))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
