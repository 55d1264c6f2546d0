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
class Span:
    """A time in which something computes, or is on a wire."""

    lane: str  # ``"compute"``, or which wire
    start: float  # in seconds from the step's beginning
    end: float
    text: str  # what it is


@dataclass(frozen=True)
class DrawnTimeline:
    """A step as it is expected to run in one order."""

    title: str
    seconds: float  # of the step
    exposed: float  # of them, waited for collectives
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    numerics: Numerics  # what it may do to the numbers
    num_rewrites: int
    num_nodes: tuple[int, int]  # nodes of the graph before and after
    collectives: tuple[Mapping[str, int], Mapping[str, int]]  # their number by operator, before and after
    seconds: float  # its wall time, checks apart
    notes: tuple[str, ...]  # what it skipped and why
    graph_diff: tuple[Hunk, ...] = ()  # the places that it changed, those that look alike once; if asked for
    num_left_out: int = 0  # changed places that no hunk shows, since there would be too many
    # What a whole step sends, before and after, for its time on paper; None unless ``graph_diff`` was asked for, and
    # where sizes vary.
    traffic: tuple[Traffic, Traffic] | None = None
    timelines: tuple[
        DrawnTimeline, ...
    ] = ()  # of a pass that decides by seconds: the order it was given, and its own

    @property
    def num_collectives(self) -> tuple[int, int]:
        before, after = (sum(counts.values()) for counts in self.collectives)
        return before, after

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, as a run file stores them."""
        return {**dataclasses.asdict(self), "numerics": self.numerics.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassReport:
        """Reads back what :meth:`to_json` wrote."""
        hunks = (Hunk(tuple(each["before"]), tuple(each["after"]), each["num_alike"]) for each in data["graph_diff"])
        made = {
            "numerics": Numerics(data["numerics"]),
            "num_nodes": tuple(data["num_nodes"]),
            "collectives": tuple(data["collectives"]),
            "notes": tuple(data["notes"]),
            "graph_diff": tuple(hunks),
            "traffic": data["traffic"] and tuple(map(Traffic.from_json, data["traffic"])),
            "timelines": tuple(
                DrawnTimeline(**each | {"spans": tuple(Span(**span) for span in each["spans"])})
                for each in data["timelines"]
            ),
        }
        return cls(**{each.name: data[each.name] for each in dataclasses.fields(cls)} | made)


@dataclass(frozen=True)
class PipelineReport:
    """What each pass of a pipeline did; ``str()`` is a table."""

    passes: tuple[PassReport, ...]  # one report each, in order
    notes: tuple[str, ...] = ()  # what the capture had to say
    # What is proved of the result; None if nothing was to be, or if the report comes from a file, which keeps
    # ``proof`` alone.
    certificate: Certificate | None = field(default=None, compare=False)
    proof: str = ""  # the same in a line; empty if it is not known

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
        return "\n".join(aligned(rows, max_rows=len(rows)) + notes)
