"""Command line: ``python -m experiments.fsdp_parity --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.fsdp_parity.cases import CASES
from experiments.fsdp_parity.run import train_and_judge
from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select


def main(steps: int = 25, out: Path = Path("runs/fsdp_parity"), only: Only = "") -> int:
    """Trains small language models on 4 processes: eagerly with FSDP2, captured, and compiled with our passes.

    Both add in the order of NCCL's rings on 2 nodes of 2 GPUs. The default pipeline must give eager's bits at
    every step, every control must not. Exit code 0 if so, else 1; 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases:
        return 2
    experiment = ParityExperiment("Captured step against eager FSDP2", cases, steps, out)
    return experiment.conclude(train_and_judge(experiment, cases))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
