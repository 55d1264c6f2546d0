"""Command line: ``python -m experiments.torchrec_support --help``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tyro

from experiments.harness.outcome import Outcome, Outcomes
from experiments.harness.select import Only, select
from experiments.torchrec_support.cells import cells
from experiments.torchrec_support.ranks import PRELOAD, try_cells
from experiments.torchrec_support.table import make_page
from graphpasses.parity.launch import run_ranks


def main(
    out: Path = Path("out/torchrec_support.jsonl"),
    upstream: Path = Path("out/torchrec_upstream.jsonl"),
    write: Path | None = None,
    only: Only = "",
) -> int:
    """Tries every feature of TorchRec that a CPU can, compiled, and compares it with eager after every step.

    Exit code 1 if a cell has other bits than eager, or fails without a refusal; 2 for wrong arguments.

    Args:
        out: file of the outcomes, a line each; what stands there is not tried again.
        upstream: file of what ``python -m experiments.torchrec_support.upstream`` found, for the page.
        write: page to write the tables of all outcomes to, as Markdown.
        only: try only the cells whose name contains this.
    """
    selected = select(tuple(cells()), only)
    if not selected:
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    known = Outcomes(out)
    while todo := [cell for cell in selected if cell.name not in known.read()]:
        some = [cell for cell in todo if cell.num_ranks == todo[0].num_ranks]
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(try_cells, some[0].num_ranks, some, known, Path(folder), preload=PRELOAD, timeout=24 * 3600.0)
    outcomes = known.read()
    if write is not None:
        found = {cell: outcomes.get(cell.name, Outcome("not run")) for cell in cells()}
        write.write_text(make_page(found, Outcomes(upstream).read()))
    bad = [cell.name for cell in selected if outcomes[cell.name].is_bad]
    print(
        *bad,
        f"{len(bad)} of {len(selected)} cells differ, fail without a refusal or have no control",
        sep="\n",
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
