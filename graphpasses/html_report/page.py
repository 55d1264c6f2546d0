"""One self-contained page about recorded runs: where they are equal, why they part, and what passes did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, PackageLoader, StrictUndefined

from graphpasses.errors import CompareError
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.html_report.buckets import BucketGroup, RingNames, draw_buckets
from graphpasses.html_report.explanation import explain, show_ring
from graphpasses.html_report.steps import Cell, draw_losses, draw_strip
from graphpasses.parity.compare import Comparison, compare_runs, step_differences
from graphpasses.parity.run_file import Run
from graphpasses.simulate.prediction import Prediction, predict
from graphpasses.simulate.rings import Topology

__all__ = ["render_page"]


@dataclass(frozen=True)
class _Section:
    """One run, against the first if it is another.

    Args:
        letter: its name on the page.
        run: the run.
        topology: of its cluster.
        trouble: why it cannot be compared; empty if it can, or is the first.
        comparison: with the first run.
        strip: which steps are equal.
        sentences: about the first difference.
        num_moved: gradients that lie elsewhere.
        prediction: what its layout adds in another order.
        buckets: its buckets, beside the first run's.
        has_both_layouts: whether both runs recorded theirs; else the buckets are those of one.
    """

    letter: str
    run: Run
    topology: Topology
    trouble: str = ""
    comparison: Comparison | None = None
    strip: tuple[Cell, ...] = ()
    sentences: tuple[str, ...] = ()
    num_moved: int = 0
    prediction: Prediction | None = None
    buckets: tuple[BucketGroup, ...] = ()
    has_both_layouts: bool = False


def render_page(runs: Sequence[tuple[Run, Topology]]) -> str:
    """Draws runs as a page of HTML that needs nothing else: no network, no other file.

    Args:
        runs: at least one, each with the topology of its cluster; the others are compared with the first.

    Returns:
        The page. A run that cannot be compared with the first has a section that says why.

    Example:
        >>> run = read_run("eager.jsonl")  # doctest: +SKIP
        >>> html = render_page([(run, Topology(run.header.world_size, gpus_per_node=8))])  # doctest: +SKIP
    """
    names = RingNames()
    (first, topology), *others = runs
    sections = [_Section("A", first, topology)]
    if not others:
        buckets = draw_buckets(first.header.layouts, None, (topology, topology), None, names)
        sections = [_Section("A", first, topology, buckets=buckets)]
    for index, (run, its_topology) in enumerate(others, start=1):
        sections.append(_compared(_letter(index), first, topology, run, its_topology, names))
    environment = Environment(
        loader=PackageLoader("graphpasses.html_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template("report.html.jinja").render(
        sections=sections,
        losses=draw_losses([(section.letter, section.run) for section in sections]),
        rings=[(number, len(ring), show_ring(ring, " → ")) for ring, number in names.numbers.items()],
    )
    return page


def _compared(
    letter: str, first: Run, topology_a: Topology, run: Run, topology_b: Topology, names: RingNames
) -> _Section:
    a, b = first.header.layouts, run.header.layouts
    has_both = a is not None and b is not None
    is_one_cluster = topology_a.num_ranks == topology_b.num_ranks
    prediction = predict(a, b, topology_b) if a and b and is_one_cluster else None
    section = _Section(
        letter,
        run,
        topology_b,
        num_moved=len(diff_layouts(a, b).moves) if a and b else 0,
        prediction=prediction,
        buckets=draw_buckets(a if has_both else None, b, (topology_a, topology_b), prediction, names),
        has_both_layouts=has_both,
    )
    try:
        comparison, differences = compare_runs(first, run), step_differences(first, run)
    except CompareError as error:
        return replace(section, trouble=str(error))
    sentences: Iterable[str] = ()
    if comparison.parting is not None:
        sentences = explain(
            comparison.parting,
            prediction,
            letter=letter,
            has_layouts=has_both,
            num_moved=section.num_moved,
        )
    return replace(section, comparison=comparison, strip=draw_strip(differences), sentences=tuple(sentences))


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"run {index + 1}"
