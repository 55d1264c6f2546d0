"""Command line: ``python -m experiments.torchrec_bench --help``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import tyro

from experiments.harness.select import Only, select
from experiments.torchrec_bench.ranks import measure
from experiments.torchrec_bench.results import Results, floors_table, goals_table, results_table, to_json
from experiments.torchrec_bench.workloads import Workload, workloads
from graphpasses.terminal import make_console


def main(
    rounds: int = 20,
    table_mib: int = 256,
    out: Path = Path("runs/torchrec_bench.json"),
    only: Only = "",
) -> int:
    """Trains recommenders eagerly, under torch.compile as shipped and compiled by graphpasses, side by side.

    Exit code 1 if a variant fails, else 0, whatever the goals; 2 for wrong arguments.

    Args:
        rounds: counted rounds; each runs one step of every variant.
        table_mib: size in MiB that no table exceeds; 256 keep all variants of a workload within 24 GiB, side by side.
        out: file for all numbers.
        only: measure only the workloads whose name contains this.
    """
    selected = select(workloads(table_mib), only)
    if not selected:
        return 2
    console = make_console()
    start = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {text}", markup=False)

    measured: list[tuple[Workload, Results]] = []
    for workload in selected:
        say(f"{workload}: {rounds} rounds of {len(workload.variants)} variants")
        results = measure(workload, rounds, say)
        measured.append((workload, results))
        for variant, result in results.items():
            if isinstance(result, str):
                say(f"{variant} failed: {result}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(to_json(measured), indent=1) + "\n")
    console.print(results_table(measured), floors_table(measured), goals_table(measured), sep="\n")
    say(f"all numbers are in {out}")
    return int(any(isinstance(result, str) for _, results in measured for result in results.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
