"""Command line: ``python -m experiments.torchrec_parity --help``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments._parity.select import select
from experiments._parity.verdict import Verdict, compare, run_path, verdict_table
from experiments.torchrec_parity.cases import CASES, EAGER, UNCOMPILED, Case, is_table
from experiments.torchrec_parity.ranks import Outcome, train_cases, try_refused


def main(
    steps: int = 10,
    out: Path = Path("runs/torchrec_parity"),
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
) -> int:
    """Trains small recommenders that TorchRec shards over 2 and 4 processes, eagerly and compiled with all passes.

    Losses, gradients, tables and optimizer states must have eager's bits at every step, every control must not.
    Exit code 0 if so, else 1.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases:
        return 2
    console = Console(width=None if sys.stdout.isatty() else 190)
    num_runs = sum(len(case.variants) for case in cases)
    console.print(f"{len(cases)} cases, {num_runs} runs of {steps} steps")
    start = time.monotonic()
    outcomes = train_cases(cases, steps, out)
    table, num_wrong = judge(cases, outcomes, {} if only else try_refused(), out, steps)
    console.print(table)
    console.print(f"{num_wrong} of {table.row_count} rows are wrong; {time.monotonic() - start:.0f} s")
    return 1 if num_wrong else 0


def judge(
    cases: Sequence[Case],
    outcomes: Mapping[tuple[str, str], Outcome],
    refusals: Mapping[str, tuple[str, bool]],
    folder: Path,
    num_steps: int,
) -> tuple[Table, int]:
    """Compares every recorded variant with what it must equal, or differ from.

    Args:
        cases: what was trained.
        outcomes: of each (case, variant).
        refusals: how TorchRec refuses what it cannot do on CPU, and whether for the known reason.
        folder: where the run files are.
        num_steps: steps that each run must have.

    Returns:
        A table with a row per comparison, and how many of them are not as they must be.
    """
    verdicts = [verdict for case in cases for verdict in _verdicts(case, outcomes, folder, num_steps)]
    verdicts += [
        Verdict(
            "TorchRec cannot on CPU", name, "be refused", message or "works: add a case", known, ("",) * 3
        )
        for name, (message, known) in refusals.items()
    ]
    table = verdict_table(
        "TorchRec compiled with all passes, against TorchRec eager",
        verdicts,
        "graphs",
        "collectives",
        "TBE calls",
    )
    return table, sum(not verdict.right for verdict in verdicts)


def _verdicts(
    case: Case, outcomes: Mapping[tuple[str, str], Outcome], folder: Path, num_steps: int
) -> list[Verdict]:
    """Returns the rows of one case."""
    verdicts = []
    eager = outcomes[case.name, EAGER]
    for row in case.comparisons:
        outcome = outcomes[case.name, row.variant]
        paths = (run_path(folder, case.name, name) for name in (row.other, row.variant))
        result, right = compare(*paths, num_steps, row.must, is_table if row.only_tables else None)
        cells = ("", "", "")
        if outcome.num_graphs and eager.calls and outcome.calls:
            cells = (
                f"{outcome.num_graphs}",
                f"{_sum(eager.calls.collectives)} → {_sum(outcome.calls.collectives)}",
                f"{_sum(eager.calls.lookups)} → {_sum(outcome.calls.lookups)}",
            )
        right &= outcome.num_graphs == (row.variant not in UNCOMPILED)
        label = f"{row.variant}, {'tables ' * row.only_tables}against {row.other}"
        verdicts.append(Verdict(case.name, label, row.must, outcome.failure or result, right, cells))
    return verdicts


def _sum(counts: tuple[int, int]) -> str:
    return "{}+{}".format(*counts)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
