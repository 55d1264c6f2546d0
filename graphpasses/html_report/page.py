"""One self-contained page about recorded runs: where they are equal, why they diverge, and what passes did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, PackageLoader, StrictUndefined

from graphpasses.errors import CompareError
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.html_report.buckets import BucketGroup, RingNames, draw_buckets
from graphpasses.html_report.explanation import explain
from graphpasses.html_report.scale import ScaleTable, scale_tables
from graphpasses.html_report.steps import Cell, draw_losses, draw_strip
from graphpasses.parity.compare import Comparison, compare_runs, step_differences
from graphpasses.parity.location import how_to_locate
from graphpasses.parity.run_file import Run
from graphpasses.scale import Speeds
from graphpasses.simulate.prediction import predict
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.trees import show_order


@dataclass(frozen=True)
class ShownRun:
    """A run to draw."""

    run: Run
    topology: Topology
    is_assumed: bool = False  # whether the topology is a guess: neither the run nor the user gave one


@dataclass(frozen=True)
class _Section:
    """One run, against the first if it is another."""

    letter: str  # its name on the page
    shown: ShownRun  # the run and its cluster
    trouble: str = ""  # why it cannot be compared; empty if it can, or is the first
    comparison: Comparison | None = None  # with the first run
    strip: tuple[Cell, ...] = ()  # which steps are equal
    sentences: tuple[str, ...] = ()  # about the first difference
    num_moved: int = 0  # parameters whose gradients have another place
    # Those of which elements are reduced differently; None if it is not known.
    num_reordered: int | None = None
    buckets: tuple[BucketGroup, ...] = ()  # its buckets, beside the first run's
    has_both_layouts: bool = False  # whether both runs recorded theirs; else the buckets are those of one
    scale: tuple[ScaleTable, ...] = ()  # its step on more ranks, on paper


def render_page(runs: Sequence[ShownRun], speeds: Speeds | None = None) -> bytes:
    """Draws runs, the others compared with the first, as a page of HTML that needs no network and no other file."""
    names, speeds = RingNames(), speeds or Speeds()
    first, *others = runs
    layout, topologies = first.run.header.layouts, (first.topology, first.topology)
    alone = () if others else draw_buckets(layout, None, topologies, None, names)
    sections = [_Section("A", first, buckets=alone)]
    sections += [
        _compared(chr(ord("A") + index) if index < 26 else f"run-{index + 1}", first, other, names)
        for index, other in enumerate(others, start=1)
    ]
    sections = [replace(each, scale=scale_tables(each.shown.run, speeds)) for each in sections]
    environment = Environment(
        loader=PackageLoader("graphpasses.html_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        sections=sections,
        speeds=speeds,
        losses=draw_losses([(section.letter, section.shown.run) for section in sections]),
        rings=[(number, len(ring), show_order(ring, limit=16)) for ring, number in names.numbers.items()],
    )
    return page.encode(errors="replace")  # file names may be bytes that are no text


def _compared(letter: str, first: ShownRun, other: ShownRun, names: RingNames) -> _Section:
    a, b = first.run.header.layouts, other.run.header.layouts
    has_both = a is not None and b is not None
    prediction = predict(a, b, other.topology) if a and b and first.topology == other.topology else None
    moved = {move.fqn for move in diff_layouts(a, b).moves} if a and b else set()
    section = _Section(
        letter,
        other,
        num_moved=len(moved),
        num_reordered=None if prediction is None else len({each.fqn for each in prediction.reordered}),
        buckets=draw_buckets(a if has_both else None, b, (first.topology, other.topology), prediction, names),
        has_both_layouts=has_both,
    )
    try:
        comparison, differences = compare_runs(first.run, other.run), step_differences(first.run, other.run)
    except CompareError as error:
        return replace(section, trouble=str(error))
    sentences: list[str] = []
    if (divergence := comparison.divergence) is not None:
        sentences += explain(divergence, prediction, letter=letter, has_layouts=has_both, num_moved=len(moved))
        sentences.append(how_to_locate(comparison))
    return replace(section, comparison=comparison, strip=draw_strip(differences), sentences=tuple(sentences))
