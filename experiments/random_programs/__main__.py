"""Command line: ``python -m experiments.random_programs --help``."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch
import tyro

from experiments.harness.outcome import Outcome, Outcomes, counted
from experiments.random_programs.loop import Loop
from experiments.random_programs.program import AnnealedProgram, BrokenProgram, Program, RowsProgram
from experiments.random_programs.running import judge
from graphpasses.parity.launch import RankError, run_ranks


def main(
    kind: Literal["programs", "loops", "broken", "rows", "annealed"] = "programs",
    first: int = 0,
    num: int = 50,
    num_ranks: int = 1,
    out: Path | None = None,
    timeout: float = 60.0,
) -> int:
    """Trains random programs eagerly and as captured and compiled steps; prints those that differ, shrunk.

    Exit code 0 if none differs or fails, else 1.

    Args:
        kind: whether forwards do all they can, or loops over models as users have them, between their steps, or
            forwards that are compiled and break their graphs, or those with numbers of rows that values give,
            or with numbers that the loop changes and functions of torch build in.
        first: seed.
        num: number of seeds.
        num_ranks: processes, over which FSDP2 shards the model if there are several.
        out: folder of the programs.
        timeout: seconds for a program.
    """
    torch.set_num_threads(1)
    folder = out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    outcomes, context = Outcomes(folder / f"outcomes_{first}.jsonl"), multiprocessing.get_context("fork")
    kinds = {"programs": Program, "loops": Loop, "broken": BrokenProgram, "rows": RowsProgram}
    make = (kinds | {"annealed": AnnealedProgram})[kind]
    for seed in range(first, first + num):
        if num_ranks > 1:
            try:
                run_ranks(judge, num_ranks, seed, folder, outcomes, make, timeout=timeout)
            except RankError as error:
                outcomes.add(f"{seed} ranks", Outcome("fails", str(error)))
            continue
        process = context.Process(target=judge, args=(seed, folder, outcomes, make))
        process.start()
        process.join(timeout)
        if process.is_alive() or process.exitcode:
            process.kill()
            outcomes.add(f"{seed} process", Outcome("fails", "it did not end"))
    found = outcomes.read()
    for name, outcome in found.items():
        if outcome.kind in ("differs", "fails"):
            print(f"{name}: {outcome.kind}, {outcome.detail}")
    print(counted(found.values(), "runs of programs"))
    return int(any(outcome.kind in ("differs", "fails") for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
