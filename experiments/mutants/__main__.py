"""Command line: ``python -m experiments.mutants --help``."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import tyro
from rich.table import Table

from experiments.harness.select import Only, select
from experiments.mutants.graphs import SOURCES, Pair, Source
from experiments.mutants.judge import CHECKERS, KINDS, Judged, judge, refused_pipelines
from graphpasses.terminal import make_console

RESULTS = ("same bits", "other bits", "hangs", "fails")


def main(num_of_a_kind: int = 12, only: Only = "", survivors: Path | None = None) -> int:
    """Makes wrong rewrites of graphs of all stages, runs each, and counts what is noticed before it runs.

    Exit code 0 if every mutant that changes bits, hangs or fails is rejected, and every correct pipeline is accepted,
    else 1; 2 for wrong arguments.

    Args:
        num_of_a_kind: of each graph and kind at most so many mutants.
        only: mutate only the graphs of models whose name contains this text.
        survivors: file for what no checker rejects, one mutant a line, and for refused pipelines.
    """
    sources = select(SOURCES, only)
    if not sources:
        return 2
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # calls that cannot run
    console = make_console()
    start = time.monotonic()
    judged: list[Judged] = []
    refused: list[str] = []
    num_graphs = 0
    for source in sources:
        for pair, name, mutants in _judge(source, num_of_a_kind):
            judged += mutants
            num_graphs += 1
            missed = sum(each.is_missed for each in mutants)
            seconds = time.monotonic() - start
            console.print(f"{seconds:4.0f} s  {name}: {len(mutants)} mutants, {missed} missed")
            if name.endswith("rewritten"):
                refused += refused_pipelines(pair)
    console.print(make_table(judged))
    missed = [each for each in judged if each.is_missed]
    console.print(
        f"{len(judged)} mutants of {num_graphs} graphs: {len(missed)} missed; "
        f"{len(refused)} correct pipelines refused; {time.monotonic() - start:.0f} s"
    )
    if survivors is not None:
        lines = [f"- {each.edit.kind} | {each.graph} | {each.edit.text} | {each.result}" for each in missed]
        survivors.write_text("\n".join([*refused, *lines, ""]))
    return int(bool(missed or refused))


def _judge(source: Source, num_of_a_kind: int) -> Iterator[tuple[Pair, str, list[Judged]]]:
    with source.pairs() as pairs:
        for pair in pairs:
            for name, graph in pair.graphs.items():
                yield pair, name, list(judge(pair, name, graph, num_of_a_kind))


def make_table(judged: Sequence[Judged]) -> Table:
    """Returns the table: for each kind how many mutants did what, and how many of the harmful ones were rejected.

    Args:
        judged: all mutants.
    """
    table = Table("kind", title="Wrong rewrites, and what rejects those that change bits, hang or fail")
    for column in ("made", *RESULTS, *CHECKERS, "missed"):
        table.add_column(column, justify="right")
    for kind in KINDS:
        table.add_row(kind, *_cells([each for each in judged if each.edit.kind == kind]))
    table.add_section()
    table.add_row("all", *_cells(judged))
    return table


def _cells(judged: Sequence[Judged]) -> Iterator[str]:
    results = Counter(each.result for each in judged)
    harmful = [each for each in judged if each.is_harmful]
    yield str(len(judged))
    yield from (str(results[result]) for result in RESULTS)
    yield from (str(sum(checker in each.rejected for each in harmful)) for checker in CHECKERS)
    yield str(sum(each.is_missed for each in judged))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
