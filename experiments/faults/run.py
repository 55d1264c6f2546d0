"""Trains each fault's programs, and asks ``locate`` where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.faults import replicas, single
from experiments.faults.captured import locations
from experiments.faults.fault import BEGINNING, Answer, Fault
from graphpasses.errors import GraphPassesError
from graphpasses.parity import Location, locate_runs, read_run
from graphpasses.parity.launch import run_ranks

__all__ = ["FAULTS", "HEALTHY", "Found", "judge", "judge_captured", "train_all"]

FAULTS = (*single.FAULTS, *replicas.FAULTS)
HEALTHY = "healthy, twice"
"""Name of the rows that compare a healthy program with itself."""


@dataclass(frozen=True)
class Found:
    """What ``locate`` said.

    Args:
        name: of the fault.
        expected: what must be named; None if nothing may be.
        answer: what was named; None if nothing was.
        text: what it said, for people.
    """

    name: str
    expected: Answer | None
    answer: Answer | None
    text: str

    @property
    def is_right(self) -> bool:
        """Whether operator, phase, module and rank are those of the fault."""
        ours, theirs = self.expected, self.answer
        if ours is None or theirs is None:
            return ours is theirs and self.text == ""
        what = ours.phase, ours.operator, ours.module
        return what == (theirs.phase, theirs.operator, theirs.module) and theirs.ranks[0] in ours.ranks


def train_all(faults: Sequence[Fault], folder: Path) -> None:
    """Trains the programs of faults, those of two ranks in one launch.

    Args:
        faults: of which.
        folder: for the run files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for num_ranks in sorted({fault.num_ranks for fault in faults}):
        names = tuple(fault.name for fault in faults if fault.num_ranks == num_ranks)
        if num_ranks == 1:
            _train(names, folder)
        else:
            run_ranks(_train, num_ranks, names, folder)


def _train(names: Sequence[str], folder: Path) -> None:
    faults = [fault for fault in FAULTS if fault.name in names]
    healthy = dict.fromkeys(fault.healthy for fault in faults)
    for program in healthy:
        for name in (_path(folder, program.__name__), _path(folder, f"{program.__name__} again")):
            program().train(name)
    for fault in faults:
        fault.faulty().train(_path(folder, fault.name))


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def judge(faults: Sequence[Fault], folder: Path) -> Iterator[Found]:
    """Says of each fault what ``locate`` names, and of each healthy program that it names nothing.

    Args:
        faults: whose programs were trained.
        folder: of the run files.
    """
    for fault in faults:
        yield Found(fault.name, fault.answer, *_locate(folder, fault.healthy.__name__, fault.name))
    for program in dict.fromkeys(fault.healthy.__name__ for fault in faults):
        yield Found(f"{HEALTHY}: {program}", None, *_locate(folder, program, f"{program} again"))


def _locate(folder: Path, a: str, b: str) -> tuple[Answer | None, str]:
    try:
        return _answer(locate_runs(*(read_run(_path(folder, name)) for name in (a, b))))
    except GraphPassesError as error:
        return None, f"{type(error).__name__}: {error}"


def judge_captured() -> Iterator[Found]:
    """Says of each wrong graph of a captured step what ``locate_step`` names."""
    for edit, location in locations():
        name, expected = (f"{HEALTHY}: captured", None) if edit is None else (edit.name, edit.answer)
        yield Found(name, expected, *_answer(location))


def _answer(location: Location) -> tuple[Answer | None, str]:
    difference = location.difference
    if difference is None:
        return None, ""
    ranks = (difference.rank,)
    if difference.kind == "start":
        return Answer(BEGINNING, difference.values[0], ranks=ranks), str(difference)
    operator = difference.operator
    if operator is None:
        return None, str(difference)
    where = operator.where
    return Answer(where.phase or "forward", operator.operator, where.module, ranks), str(difference)
