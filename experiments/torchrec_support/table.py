"""The support matrix as a page."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.harness.outcome import Outcome, counted, messages_list, shown
from experiments.torchrec_support.cells import Cell

__all__ = ["make_page", "read_cells"]

_HEAD = """# TorchRec: what keeps eager's bits

Each cell is a model that was built twice from one seed and trained for 4 steps on gloo: eagerly, and compiled with
`gp.compile(model, inner="aot_eager")` and nothing else. After each step the loss, the predictions, every weight and
every optimizer state were compared. This page was written by

    python -m experiments.torchrec_support --write docs/torchrec_support.md

| | |
|---|---|
| bits | All are equal after every step. The model is one graph, or as many as stand there. |
| rounding | A pass that was asked for says that it may round, and what differs differs by at most 1e-5. |
| refused | graphpasses refuses it by name; the message stands below. |
| eager cannot | TorchRec itself fails on a CPU: there is nothing to compare with. |
| not run | Nothing is known of it: the run was cut short. |

A cell counts only if its *control* differs: the same eager run with a learning rate of the tables that is 1 %
higher. What is not named in a cell is plain: an EBC, table-wise, fused, row-wise Adagrad (SGD for zero-collision
hashing), fp32, 2 ranks. "mixed" is table-wise, row-wise and data-parallel tables in one collection. Zero-collision
hashing runs eagerly up to its embeddings, with a graph break that the report names; what follows is compiled.
"""
_UPSTREAM_HEAD = """## TorchRec's own tests

TorchRec's multi-rank tests, from its sources, on gloo, with every model that they shard compiled in place
(`python -m experiments.torchrec_support.upstream SOURCES`); what fails is run once more, uncompiled. One line is
one example that launched ranks, or a test that launches none.
"""


def make_page(outcomes: Mapping[Cell, Outcome], upstream: Mapping[str, Outcome]) -> str:
    """Makes a table for each group, and a list of the messages.

    Args:
        outcomes: of each cell.
        upstream: of each example of TorchRec's own tests.

    Returns:
        Markdown.
    """
    messages: dict[str, int] = {}
    parts = [_HEAD, counted(outcomes.values(), "cells")]
    for group in dict.fromkeys(cell.group for cell in outcomes):
        members = [cell for cell in outcomes if cell.group == group]
        columns = list(dict.fromkeys(cell.column for cell in members))
        found = {(cell.row, cell.column): outcomes[cell] for cell in members}
        lines = [f"| {group} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for row in dict.fromkeys(cell.row for cell in members):
            cells = " | ".join(shown(found.get((row, column)), messages) for column in columns)
            lines.append(f"| {row} | {cells} |")
        parts += [f"## {group[0].upper()}{group[1:]}", "\n".join(lines)]
    if upstream:
        lines = ["| test | result |", "|---|---|"]
        lines += [f"| {name} | {shown(outcome, messages)} |" for name, outcome in upstream.items()]
        parts += [_UPSTREAM_HEAD, counted(upstream.values(), "examples"), "\n".join(lines)]
    parts += ["## Messages", messages_list(messages)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def read_cells(page: str) -> list[tuple[str, str, str]]:
    """Returns the group, row and column of each cell of a page.

    Args:
        page: what :func:`make_page` made.

    Example:
        >>> read_cells("| batches | row_wise |\\n|---|---|\\n| as all | bits |\\n")
        [('batches', 'as all', 'row_wise')]
    """
    cells: list[tuple[str, str, str]] = []
    head: list[str] = []
    for line in page.splitlines():
        values = [value.strip() for value in line.strip("|").split("|")] if line.startswith("|") else []
        if not values:
            head = []
        elif not head:
            head = values
        elif not values[0].startswith("---"):
            cells += [
                (head[0], values[0], column) for column, value in zip(head[1:], values[1:], strict=True) if value
            ]
    return cells
