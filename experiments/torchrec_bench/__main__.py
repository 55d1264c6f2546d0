"""Command line: ``python -m experiments.torchrec_bench --help``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments.torchrec_bench.results import Results, goals_table, results_table, to_json
from experiments.torchrec_bench.turns import measure
from experiments.torchrec_bench.works import Work, works


def main(
    rounds: int = 20,
    table_mib: int = 256,
    out: Path = Path("runs/torchrec_bench.json"),
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
) -> int:
    """Trains recommenders eagerly, under torch.compile as shipped and compiled by graphpasses, side by side.

    Exit code 1 if a variant fails, else 0, whatever the goals.

    Args:
        rounds: counted rounds; each runs one step of every variant.
        table_mib: size in MiB that no table exceeds; 256 keep all variants of a work within 24 GiB, side by side.
        out: file for all numbers.
        only: measure only the works whose name contains this.
    """
    chosen = [work for work in works(table_mib) if only in str(work)]
    if not chosen:
        print(
            f"no work contains {only!r}; there are: {'; '.join(map(str, works(table_mib)))}", file=sys.stderr
        )
        return 2
    console = Console(width=None if sys.stdout.isatty() else 170, soft_wrap=True)
    start = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {text}", highlight=False)

    measured: list[tuple[Work, Results]] = []
    for work in chosen:
        say(f"{work}: {rounds} rounds of {len(work.variants)} variants")
        results = measure(work, rounds, say)
        measured.append((work, results))
        for variant, result in results.items():
            if isinstance(result, str):
                say(f"{variant} failed: {result}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(to_json(measured), indent=1) + "\n")
    console.print(results_table(measured), goals_table(measured), sep="\n")
    say(f"all numbers are in {out}")
    return 1 if any(isinstance(result, str) for _, results in measured for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
