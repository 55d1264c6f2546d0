"""Tables of a run's step on paper, for 8 to 100,000 ranks."""

from __future__ import annotations

from dataclasses import dataclass

from graphpasses.errors import LayoutError, UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.integrations.torchtitan.buckets import default_buckets
from graphpasses.parity.run_file import Run
from graphpasses.scale import Speeds
from graphpasses.scale.step_time import ScaleRow, bucketings, scale_rows, steps_of_passes

_TITAN = "torchtitan's buckets"


@dataclass(frozen=True)
class ScaleTable:
    title: str
    rows: tuple[ScaleRow, ...]  # see :func:`graphpasses.scale.step_time.scale_rows`
    notes: tuple[str, ...] = ()  # what is left out, and why


def scale_tables(run: Run, speeds: Speeds) -> tuple[ScaleTable, ...]:
    """Returns the tables that a run recorded: of its buckets, and of each graph before and after each pass."""
    found = []
    if run.header.layouts is not None:
        found.append(_of_layout(run.header.layouts, run.header.world_size, speeds))
    for name, report in run.passes.items():
        if steps := steps_of_passes(report):
            title = f"what passes did to the graph {name!r}"
            try:
                found.append(ScaleTable(title, scale_rows(steps, speeds)))
            except UnsupportedError as error:
                found.append(ScaleTable(title, (), (f"not computed: {error}",)))
    return tuple(found)


def _of_layout(layout: Layout, num_ranks: int, speeds: Speeds) -> ScaleTable:
    others: dict[str, tuple[tuple[str, ...], ...]] = {}
    notes: tuple[str, ...] = ()
    try:
        others[_TITAN] = default_buckets(
            dict.fromkeys(entry.fqn for bucket in layout.buckets for entry in bucket.entries)
        )
    except UnsupportedError as error:
        notes = (f"without {_TITAN}: {error}",)
    title = "FSDP2's step with these buckets"
    try:
        return ScaleTable(title, scale_rows(bucketings(layout, num_ranks, speeds, others), speeds), notes)
    except LayoutError as error:
        return ScaleTable(title, (), (f"not computed: {error}",))
