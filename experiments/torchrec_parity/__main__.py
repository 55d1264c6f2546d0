"""Command line: ``python -m experiments.torchrec_parity --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select
from experiments.torchrec_parity.cases import CASES
from experiments.torchrec_parity.ranks import PRELOAD, try_refused
from experiments.torchrec_parity.run import COLUMNS, judge_refusals, train_and_judge
from graphpasses.parity.launch import run_ranks

MIN_STEPS = 4


def main(steps: int = 10, out: Path = Path("runs/torchrec_parity"), only: Only = "") -> int:
    """Trains small recommenders that TorchRec shards over 2 and 4 processes, eagerly and compiled with all passes.

    Losses, gradients, tables and optimizer states must have eager's bits at every step, every control must not.
    Exit code 0 if so, else 1; 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run; at least 4, as the first two or three of 4 ranks run as in eager.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if cases and steps < MIN_STEPS and any((case.dense, case.num_ranks) == ("ddp", 4) for case in cases):
        print(f"steps must be {MIN_STEPS} or more: the first of 4 ranks run as in eager", file=sys.stderr)
        return 2
    if not cases:
        return 2
    title = "TorchRec compiled with all passes, against TorchRec eager"
    experiment = ParityExperiment(title, cases, steps, out, COLUMNS)
    verdicts = train_and_judge(experiment, cases)
    if not only:
        verdicts += judge_refusals(run_ranks(try_refused, 2, preload=PRELOAD)[0])
    return experiment.conclude(verdicts)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
