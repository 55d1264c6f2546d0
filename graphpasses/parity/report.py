"""A comparison of two runs as text for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphpasses.parity.compare import BucketPlace, Comparison, Parting
from graphpasses.parity.run_file import Loss, Run
from graphpasses.terminal import add_row, plain_table

__all__ = ["comparison_to_json", "meaning", "render_comparison"]

_FORWARD = "the forward pass differs, or what went into it (the weights before the step, the batch)"
# By what parted first, whether losses were compared, and whether gradients were.
_MEANING = {
    ("loss", True, True): _FORWARD,
    ("loss", True, False): _FORWARD,
    ("gradients", True, True): "losses are equal: the backward pass or a reduction differs",
    ("gradients", False, True): (
        "losses were not compared: the forward pass, the backward pass or a reduction differs"
    ),
    ("weights", True, True): (
        "losses and gradients are equal: the optimizer step differs, or the weights it began with"
    ),
    ("weights", False, True): (
        "gradients are equal, losses were not compared: the optimizer step differs, or the weights it began with"
    ),
    ("weights", True, False): (
        "losses are equal, gradients were not compared: the backward pass, a reduction or the optimizer step differs"
    ),
    ("weights", False, False): "losses and gradients were not compared: any part of the step may differ",
}


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as plain dicts and lists, complete, for ``json.dumps``.

    Args:
        comparison: what :func:`graphpasses.parity.compare_runs` returned.
    """
    parting = comparison.parting
    return {
        "equal": comparison.equal,
        "num_steps": comparison.num_steps,
        "a": _run_to_json(comparison.a),
        "b": _run_to_json(comparison.b),
        "parting": None if parting is None else dataclasses.asdict(parting),
        "notes": list(comparison.notes),
    }


def _run_to_json(run: Run) -> dict[str, Any]:
    header = run.header
    return {
        "path": str(run.path),
        "run": header.run,
        "model": header.model,
        "torch": header.torch,
        "world_size": header.world_size,
        "seed": header.seed,
        "topology": header.topology,
        "num_steps": len(run.steps),
        "complete": run.complete,
    }


def meaning(parting: Parting) -> str:
    """Says which part of a step is to blame.

    Args:
        parting: the first step in which two runs differ.
    """
    return _MEANING[parting.first, parting.loss is not None, parting.gradients is not None]


def render_comparison(comparison: Comparison, *, max_tensors: int = 20) -> RenderableType:
    """Lays a comparison out for a terminal.

    Args:
        comparison: what :func:`graphpasses.parity.compare_runs` returned.
        max_tensors: names shown at most in each table; how many more there are is said.

    Returns:
        Something that rich can print.
    """
    lines: list[RenderableType] = [_runs_table(comparison)]
    if comparison.parting is None:
        lines.append(Text(f"equal: all {comparison.num_steps} common steps, bit for bit", style="bold green"))
    else:
        lines += _render_parting(comparison.parting, max_tensors)
    lines += [Text(f"note: {note}") for note in comparison.notes]
    return Group(*lines)


def _runs_table(comparison: Comparison) -> Table:
    table = plain_table("", "run", "model", "ranks", "steps", "file")
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        steps = f"{len(run.steps)}{'' if run.complete else ' (cut short)'}"
        header = run.header
        add_row(table, name, header.run, header.model, str(header.world_size), steps, str(run.path))
    return table


def _render_parting(parting: Parting, max_tensors: int) -> Iterable[RenderableType]:
    yield Text(f"different: first in step {parting.step}, where the {parting.first} parted first", "bold red")
    yield Text(meaning(parting))
    if parting.loss and parting.losses:
        yield _loss_table(*parting.losses, max_tensors)
    differing = [(fqn, "gradient") for fqn in parting.gradients or ()] + [
        (fqn, "weight") for fqn in parting.weights
    ]
    if differing:
        kinds: dict[str, list[str]] = {}
        for fqn, kind in differing:
            kinds.setdefault(fqn, []).append(kind)
        table = plain_table("tensor", "differs in")
        for fqn, found in list(kinds.items())[:max_tensors]:
            add_row(table, fqn, ", ".join(found))
        yield table
        yield from _more(len(kinds), max_tensors, "tensors")
    if parting.moves:
        table = plain_table("moved in its bucket", "A", "B")
        for move in parting.moves[:max_tensors]:
            add_row(table, move.fqn, _places(move.a), _places(move.b))
        yield table
        yield from _more(len(parting.moves), max_tensors, "entries")


def _loss_table(a: Loss, b: Loss, max_ranks: int) -> Group:
    table = plain_table("rank", "loss of A", "loss of B", "bits of A", "bits of B")
    rows = zip(a.values, b.values, a.bits, b.bits, strict=True)
    differing = [(str(rank), *row) for rank, row in enumerate(rows) if a.dtype != b.dtype or row[2] != row[3]]
    for row in differing[:max_ranks]:
        add_row(table, *row)
    return Group(table, *_more(len(differing), max_ranks, "ranks"))


def _more(num: int, limit: int, what: str) -> Iterable[Text]:
    if num > limit:
        yield Text(f"and {num - limit} more {what}")


def _places(places: tuple[BucketPlace, ...]) -> str:
    return "; ".join(map(_place, places)) or "in no bucket"


def _place(place: BucketPlace) -> str:
    return (
        f"byte {place.offset} of {place.num_bytes} "
        f"({place.collective} {place.op} {place.dtype}, {place.num_ranks} ranks)"
    )
