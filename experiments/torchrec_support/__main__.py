"""Command line: ``python -m experiments.torchrec_support --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.harness.select import Only, select
from experiments.torchrec_support.cells import cells
from experiments.torchrec_support.ranks import PRELOAD, try_cells
from experiments.torchrec_support.table import make_page
from graphpasses.parity.launch import run_ranks


def main(write: Path | None = None, ranks: int = 2, only: Only = "") -> int:
    """Tries every feature of TorchRec that a CPU can, compiled, and compares it with eager after every step.

    Exit code 1 if a cell has other bits than eager, or fails without a refusal; 2 for wrong arguments.

    Args:
        write: file to write the tables to, as Markdown.
        ranks: processes.
        only: try only the cells whose name contains this.
    """
    selected = select(tuple(cells()), only)
    if not selected:
        return 2
    outcomes = dict(
        zip(selected, run_ranks(try_cells, ranks, selected, preload=PRELOAD, timeout=7200.0)[0], strict=True)
    )
    page = make_page(outcomes)
    if write is not None:
        write.write_text(page)
    print(page)
    bad = [cell for cell, outcome in outcomes.items() if outcome.kind in ("differs", "fails")]
    print(f"{len(bad)} of {len(outcomes)} cells differ or fail without a refusal")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
