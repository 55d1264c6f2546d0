"""What passes did to a graph: as a table, and as data that a run file keeps. Imports no torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpasses.graph.certificate import Certificate
from graphpasses.graph.traffic import Traffic
from graphpasses.text import aligned

__all__ = ["Hunk", "Numerics", "PassReport", "PipelineReport"]


class Numerics(enum.Enum):
    """What a pass may do to the numbers, against eager."""

    BITWISE = "bitwise"
    ROUNDING = "rounding"


@dataclass(frozen=True)
class Hunk:
    """One place of a graph diff: its lines before and after a pass."""

    # Its lines before, each with its mark: ``"-"`` what goes or changes, ``"~"`` what moves, ``" "`` what
    # stays, ``"…"`` where lines are left out.
    before: tuple[str, ...]
    after: tuple[str, ...]  # its lines after; ``"+"`` marks what is new or has changed
    num_alike: int = 1  # places of the graph where the pass did the same, this one included


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    Args:
        name: the pass.
        numerics: what it may do to the numbers.
        num_rewrites: rewrites it made.
        num_nodes: nodes of the graph before and after.
        collectives: number of collectives by operator, before and after.
        seconds: its wall time, checks apart.
        notes: what it skipped and why.
        graph_diff: the places that it changed, those that look alike once; empty unless asked for.
        num_left_out: changed places that no hunk shows, since there would be too many.
        traffic: what a whole step sends, before and after, for its time on paper; None unless
            ``graph_diff`` was asked for, and where sizes vary.
    """

    name: str
    numerics: Numerics
    num_rewrites: int
    num_nodes: tuple[int, int]
    collectives: tuple[Mapping[str, int], Mapping[str, int]]
    seconds: float
    notes: tuple[str, ...]
    graph_diff: tuple[Hunk, ...] = ()
    num_left_out: int = 0
    traffic: tuple[Traffic, Traffic] | None = None

    @property
    def num_collectives(self) -> tuple[int, int]:
        """Collectives of all operators, before and after."""
        before, after = (sum(counts.values()) for counts in self.collectives)
        return before, after

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, as a run file stores them."""
        return {**dataclasses.asdict(self), "numerics": self.numerics.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassReport:
        """Reads back what :meth:`to_json` wrote."""
        before, after = data["collectives"]
        traffic = data.get("traffic")  # older files have none
        return cls(
            name=data["name"],
            numerics=Numerics(data["numerics"]),
            num_rewrites=data["num_rewrites"],
            num_nodes=(data["num_nodes"][0], data["num_nodes"][1]),
            collectives=(before, after),
            seconds=data["seconds"],
            notes=tuple(data["notes"]),
            graph_diff=tuple(
                Hunk(tuple(each["before"]), tuple(each["after"]), each["num_alike"])
                for each in data["graph_diff" if "graph_diff" in data else "excerpts"]  # older files
            ),
            num_left_out=data["num_left_out"],
            traffic=traffic and (Traffic.from_json(traffic[0]), Traffic.from_json(traffic[1])),
        )


@dataclass(frozen=True)
class PipelineReport:
    """What each pass of a pipeline did; ``str()`` is a table.

    Args:
        passes: one report each, in order.
        notes: what the capture had to say.
        certificate: what is proved of the result; None if nothing was to be, or if the report comes from a file,
            which keeps ``proof`` alone.
        proof: the same in a line; empty if it is not known.
    """

    passes: tuple[PassReport, ...]
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = field(default=None, compare=False)
    proof: str = ""

    def __iter__(self) -> Iterator[PassReport]:
        return iter(self.passes)

    def __getitem__(self, name: str) -> PassReport:
        return {report.name: report for report in self.passes}[name]

    def __str__(self) -> str:
        rows = [("pass", "numerics", "rewrites", "nodes", "collectives", "ms")]
        rows += [
            (
                report.name,
                report.numerics.value,
                str(report.num_rewrites),
                "{} → {}".format(*report.num_nodes),
                "{} → {}".format(*report.num_collectives),
                f"{report.seconds * 1e3:.1f}",
            )
            for report in self.passes
        ]
        notes = [f"capture: {note}" for note in self.notes]
        notes += [f"{report.name}: {note}" for report in self.passes for note in report.notes]
        notes += [f"proof: {self.proof}"] if self.proof else []
        notes += [] if self.certificate is None else self.certificate.not_proved()
        return "\n".join(aligned(rows) + notes)
