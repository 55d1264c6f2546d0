"""Command line: ``python -m experiments.faults --help``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import tyro
from rich.table import Table

from experiments.faults.captured import CAPTURED
from experiments.faults.fault import Fault
from experiments.faults.run import FAULTS, Found, judge, judge_captured, train_all
from experiments.harness.select import Only, select
from graphpasses.terminal import make_console


def main(only: Only = "", out: Path | None = None, verbose: bool = False) -> int:
    """Trains programs with one fault each, and asks graphpasses locate where they part from those without.

    Exit code 0 if it names the right operator, module, phase and rank of all, and nothing where there is no fault,
    else 1; 2 for wrong arguments.

    Args:
        only: only faults whose name contains this text.
        out: folder for the run files (default: a temporary one).
        verbose: print what locate said of each fault.
    """
    faults = select((*FAULTS, *CAPTURED), only)
    if not faults:
        return 2
    programs = tuple(fault for fault in faults if isinstance(fault, Fault))
    torch.set_num_threads(1)
    console = make_console()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        train_all(programs, folder)
        found = list(judge(programs, folder))
    names = {fault.name for fault in faults}
    if len(programs) < len(faults):
        found += [each for each in judge_captured() if each.name in names or each.expected is None]
    console.print(make_table(found, {fault.name: fault.source for fault in programs}))
    for each in found:
        if verbose or not each.is_right:
            console.print(f"{each.name}: {each.text or 'equal'}", highlight=False, markup=False)
    wrong = sum(not each.is_right for each in found)
    console.print(f"{wrong} of {len(found)} answers are wrong; {time.monotonic() - start:.0f} s")
    return int(bool(wrong))


def make_table(found: Sequence[Found], sources: dict[str, str]) -> Table:
    """Returns the table: what is expected of each fault, and what was said.

    Args:
        found: what was said.
        sources: where faults of each kind were published, by the name of the fault.
    """
    table = Table(title="Where two runs part")
    for column in ("fault", "published", "expected", "said", ""):
        table.add_column(column, overflow="fold")
    for each in found:
        expected = "nothing" if each.expected is None else str(each.expected)
        said = str(each.answer) if each.answer else (each.text.split(":")[0] or "nothing")
        same = "the same" if each.is_right else said
        table.add_row(each.name, sources.get(each.name, ""), expected, same, "ok" if each.is_right else "WRONG")
    return table


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
