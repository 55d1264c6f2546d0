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
from experiments.mutants.judge import CHECKERS, KINDS, Judged, Verdict, complaints, judge
from graphpasses.graph import TrainGraph
from graphpasses.terminal import make_console

RESULTS = ("same bits", "other bits", "hangs", "fails")


def main(num_of_a_kind: int = 12, only: Only = "", survivors: Path | None = None) -> int:
    """Makes wrong rewrites of graphs of all stages, runs each, and counts what is noticed before it runs.

    Exit code 0 if every mutant that changes bits, hangs or fails is rejected, and every correct pipeline is accepted,
    else 1; 2 for wrong arguments.

    Args:
        num_of_a_kind: of each graph and kind at most so many mutants.
        only: mutate only the graphs of models whose name contains this text.
        survivors: file for what no checker rejects, one mutant a line, and for correct pipelines that one does.
    """
    sources = select(SOURCES, only)
    if not sources:
        return 2
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # calls that cannot run
    console = make_console()
    start = time.monotonic()
    judged: list[Judged] = []
    correct: dict[str, Verdict] = {}
    num_graphs = 0
    for source in sources:
        for pair, name, graph, mutants in _judge(source, num_of_a_kind):
            judged += mutants
            num_graphs += 1
            missed = sum(each.is_missed for each in mutants)
            seconds = time.monotonic() - start
            console.print(f"{seconds:4.0f} s  {name}: {len(mutants)} mutants, {missed} missed")
            if pair.before is not pair.after and graph is pair.after:
                correct |= {f"{name}, {check}": verdict for check, verdict in complaints(pair).items()}
            if survivors is not None:
                survivors.write_text("\n".join(_survivors(correct, judged)))
    console.print(make_table(judged))
    missed = sum(each.is_missed for each in judged)
    refused = sum(bool(verdict.rejected) for verdict in correct.values())
    console.print(
        f"{len(judged)} mutants of {num_graphs} graphs: {missed} missed; correct pipelines: {refused} refused, "
        f"{len(correct) - refused} not proved; {time.monotonic() - start:.0f} s"
    )
    return int(bool(missed or refused))


def _survivors(correct: dict[str, Verdict], judged: Sequence[Judged]) -> Iterator[str]:
    for name, verdict in correct.items():
        yield f"- correct | {name} | {verdict.rejected or 'unproved: ' + verdict.unproved}"
    for each in sorted(judged, key=lambda each: each.is_unproved):
        if each.is_harmful and not each.is_rejected:
            unproved = "; ".join(verdict.unproved for verdict in each.verdicts.values() if verdict.unproved)
            says = f"unproved: {unproved}" if unproved else "missed"
            yield f"- {each.edit.kind} | {each.graph} | {each.edit.text} | {each.result} | {says}"


def _judge(source: Source, num_of_a_kind: int) -> Iterator[tuple[Pair, str, TrainGraph, list[Judged]]]:
    with source.pairs() as pairs:
        for pair in pairs:
            for name, graph in pair.graphs.items():
                yield pair, name, graph, list(judge(pair, name, graph, num_of_a_kind))


def make_table(judged: Sequence[Judged]) -> Table:
    """Returns the table: for each kind how many mutants did what, and how many of the harmful ones were rejected.

    Args:
        judged: all mutants.
    """
    table = Table("kind", title="Wrong rewrites, and what rejects those that change bits, hang or fail")
    for column in ("made", *RESULTS, *CHECKERS, "unproved", "missed"):
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
    yield from (str(sum(bool(each.verdicts[name].rejected) for each in harmful)) for name in CHECKERS)
    yield str(sum(each.is_unproved for each in harmful))
    yield str(sum(each.is_missed for each in judged))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
