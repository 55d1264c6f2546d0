"""Command line: ``python -m experiments.random_programs --help``."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import tyro

from experiments.harness.outcome import Outcome, Outcomes, counted
from experiments.random_programs.program import Program
from experiments.random_programs.running import OURS, judged, repair, shrunk


def main(first: int = 0, num: int = 50, out: Path | None = None, timeout: float = 60.0) -> int:
    """Trains random programs eagerly and as captured and compiled steps; prints those that differ, shrunk.

    Exit code 0 if none differs or fails, else 1.

    Args:
        first: seed.
        num: number of seeds.
        out: folder of the programs.
        timeout: seconds for a program.
    """
    torch.set_num_threads(1)
    folder = out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    outcomes, context = Outcomes(folder / f"outcomes_{first}.jsonl"), multiprocessing.get_context("fork")
    for seed in range(first, first + num):
        process = context.Process(target=_judge, args=(seed, folder, outcomes))
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


def _judge(seed: int, folder: Path, outcomes: Outcomes) -> None:
    warnings.simplefilter("ignore")
    path = folder / f"program_{seed}.py"
    program = Program(seed)
    path.write_text(program.source())
    if not repair(path):
        outcomes.add(str(seed), Outcome("eager cannot"))
        return
    ways = OURS[:2] if program.values else OURS  # Dynamo does not guard all Python values, as the limits say
    for way, outcome in judged(path, ways).items():
        outcomes.add(f"{seed} {way}", outcome)
        if outcome.kind in ("differs", "fails"):
            print("\n".join(shrunk(path, way, outcome.kind)), flush=True)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
