"""A comparison of two runs as text for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphpasses.parity.compare import Comparison, Divergence
from graphpasses.parity.run_file import Run
from graphpasses.terminal import plain_table

if TYPE_CHECKING:
    from graphpasses.fsdp.layout_diff import Place

_FORWARD = "the forward pass differs, or what went into it (the weights before the step, the batch)"
# By what differs first, whether losses were compared, and whether gradients were.
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
    divergence = comparison.divergence
    return {
        "verdict": comparison.verdict,
        "equal": comparison.equal,
        "num_steps": comparison.num_steps,
        "a": _run_to_json(comparison.a),
        "b": _run_to_json(comparison.b),
        "divergence": None if divergence is None else _divergence_to_json(divergence),
        "gaps": [dataclasses.asdict(gap) for gap in comparison.gaps],
        "notes": list(comparison.notes),
    }


def _divergence_to_json(divergence: Divergence) -> dict[str, Any]:
    names = ("step", "first", "loss", "gradients", "weights")
    return {
        **{name: getattr(divergence, name) for name in names},
        "losses": divergence.losses and [dataclasses.asdict(loss) for loss in divergence.losses],
        "moves": [
            {"fqn": fqn, "a": [_place_to_json(each) for each in a], "b": [_place_to_json(each) for each in b]}
            for fqn, a, b in _moves_by_parameter(divergence)
        ],
    }


def _place_to_json(place: Place) -> dict[str, Any]:
    names = ("collective", "op", "dtype", "offset", "padded_numel", "num_bytes")
    return {**{name: getattr(place, name) for name in names}, "num_ranks": len(place.ranks)}


def _moves_by_parameter(divergence: Divergence) -> list[tuple[str, list[Place], list[Place]]]:
    """Returns each moved parameter and its places in both runs; with HSDP it has several in each."""
    found: dict[str, tuple[list[Place], list[Place]]] = {}
    for move in divergence.moves:
        for places, place in zip(found.setdefault(move.fqn, ([], [])), (move.before, move.after), strict=True):
            if place is not None:
                places.append(place)
    return [(fqn, a, b) for fqn, (a, b) in found.items()]


def _run_to_json(run: Run) -> dict[str, Any]:
    names = ("run", "model", "torch", "world_size", "seed", "topology")
    header = {name: getattr(run.header, name) for name in names}
    return {"path": str(run.path), **header, "num_steps": len(run.steps), "complete": run.complete}


def meaning(divergence: Divergence) -> str:
    """Says which part of a step is to blame."""
    if divergence.loss and divergence.losses and len(dtypes := {each.dtype for each in divergence.losses}) > 1:
        cause = _FORWARD if divergence.gradients or divergence.weights else "record both in one"
        return f"the losses are of {' and '.join(sorted(dtypes))}: {cause}"
    text = _MEANING[divergence.first, divergence.loss is not None, divergence.gradients is not None]
    parameters = divergence.a.gradients.keys() | divergence.b.gradients.keys()
    if divergence.first == "weights" and parameters and parameters.isdisjoint(divergence.weights):
        return f"{text.partition(':')[0]}: no parameter differs, but buffers or the optimizer's state"
    return text


def render_comparison(comparison: Comparison, *, max_tensors: int = 20) -> RenderableType:
    """Lays a comparison out for a terminal; each table has at most ``max_tensors`` names."""
    lines: list[RenderableType] = [_runs_table(comparison)]
    if comparison.divergence is not None:
        lines += _render_divergence(comparison.divergence, max_tensors)
    elif comparison.equal:
        lines.append(Text(f"equal: all {comparison.num_steps} common steps, bit for bit", style="bold green"))
    else:
        text = f"not compared whole: what both runs have of {comparison.num_steps} steps is equal, bit for bit"
        lines.append(Text(text, style="bold yellow"))
    lines += [Text(f"not compared: {gap.text}") for gap in comparison.gaps]
    if comparison.gaps:
        kinds = " ".join(dict.fromkeys(gap.kind for gap in comparison.gaps))
        lines.append(Text(f"to compare in spite of that: --allow {kinds}"))
    lines += [Text(f"note: {note}") for note in comparison.notes]
    return Group(*lines)


def _runs_table(comparison: Comparison) -> Table:
    rows = []
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        steps = f"{len(run.steps)}{'' if run.complete else ' (cut short)'}"
        header = run.header
        rows.append((name, header.run, header.model, str(header.world_size), steps, str(run.path)))
    return plain_table(("", "run", "model", "ranks", "steps", "file"), rows)


def _render_divergence(divergence: Divergence, max_tensors: int) -> Iterable[RenderableType]:
    yield Text(f"first difference in step {divergence.step}: the {divergence.first}", "bold red")
    yield Text(meaning(divergence))
    if divergence.loss and divergence.losses:
        a, b = divergence.losses
        rows = enumerate(zip(a.values, b.values, a.bits, b.bits, strict=True))
        differing = [(str(rank), *row) for rank, row in rows if a.dtype != b.dtype or row[2] != row[3]]
        yield from _table(
            ("rank", "loss of A", "loss of B", "bits of A", "bits of B"), differing, max_tensors, "ranks"
        )
    kinds = {fqn: [_gradient(divergence, fqn)] for fqn in divergence.gradients or ()}
    for fqn in divergence.weights:
        kinds.setdefault(fqn, []).append("weight")
    tensors = [(fqn, ", ".join(found)) for fqn, found in kinds.items()]
    yield from _table(("tensor", "differs in"), tensors, max_tensors, "tensors")
    moves = [(fqn, _places(a), _places(b)) for fqn, a, b in _moves_by_parameter(divergence)]
    yield from _table(("moved in its bucket", "A", "B"), moves, max_tensors, "entries")


def _gradient(divergence: Divergence, fqn: str) -> str:
    a, b = divergence.a.gradients[fqn], divergence.b.gradients[fqn]
    return "gradient" if a and b else f"gradient (only {'A' if a else 'B'} has one)"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int, what: str) -> Iterable[RenderableType]:
    if not rows:
        return
    yield plain_table(columns, rows[:limit])
    if len(rows) > limit:
        yield Text(f"and {len(rows) - limit} more {what}")


def _places(places: Sequence[Place]) -> str:
    texts = (
        f"byte {each.offset} of {each.num_bytes} ({each.collective} {each.op} {each.dtype}, {len(each.ranks)} ranks)"
        for each in places
    )
    return "; ".join(texts) or "in no bucket"
