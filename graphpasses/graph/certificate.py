"""What is proved of a rewritten step, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from graphpasses.text import some


@dataclass(frozen=True)
class Launch:
    """A collective, as every rank of its group must have it."""

    call: str  # operator, arguments and dtype; and size, where ranks send as much
    ranks: tuple[int, ...]  # of its process group
    # What is sent, as far as that is known, in its order: inputs, and launches of the captured step or before this;
    # each with how far it is moved from where the captured step sends it, which is empty where this rank only pads.
    contents: Mapping[str, tuple[object, ...]]

    def may_meet(self, other: Launch) -> bool:
        """Whether another rank may launch ``other`` where this one launches this."""
        if self.ranks != other.ranks:  # these do not meet: what is sent is compared with those that do
            return {*self.ranks}.isdisjoint(other.ranks)
        # A rank may have a part of nothing.
        mine = [name for name in self.contents if _may_be_any(name, other.contents)]
        theirs = [name for name in other.contents if _may_be_any(name, self.contents)]
        is_known = bool(mine or not (self.contents and other.contents))
        return is_known and self.call == other.call and self._in_one_order(mine, other, theirs)

    def _in_one_order(self, mine: Sequence[str], other: Launch, theirs: Sequence[str]) -> bool:
        """Whether contents may be the same, in one order and place; one may be several of the other rank's."""
        reached, pending = set[tuple[int, int]](), [(0, 0)]
        while pending:
            a, b = place = pending.pop()
            if place == (len(mine), len(theirs)):
                return True
            if a == len(mine) or b == len(theirs) or place in reached or not _may_be_one(mine[a], theirs[b]):
                continue
            reached.add(place)
            moved = self.contents[mine[a]], other.contents[theirs[b]]
            if not all(moved) or moved[0] == moved[1]:
                pending += [(a + 1, b), (a, b + 1), (a + 1, b + 1)]
        return False

    def __str__(self) -> str:
        return f"{self.call} of {'; '.join(self.contents) or 'other values'}"


def _may_be_one(name: str, other: str) -> bool:
    """Whether a content may be another rank's.

    What several launches send (`launch 3/5`) may be apart on another rank: a shard of one row is its own transpose,
    and gradients of a batch of no rows are the same zeros.
    """
    if name == other or not (name.startswith("launch ") and other.startswith("launch ")):
        return name == other
    return not {*name[7:].split("/")}.isdisjoint(other[7:].split("/"))


def _may_be_any(name: str, others: Collection[str]) -> bool:
    return name in others or any(_may_be_one(name, other) for other in others)


def find_unlike_launch(one: Sequence[Launch], two: Sequence[Launch]) -> int | None:
    """Returns the first place at which two ranks launch what cannot be one collective; None if there is none."""
    for index, (a, b) in enumerate(zip_longest(one, two)):
        if a is None or b is None or not a.may_meet(b):
            return index
    return None


@dataclass(frozen=True)
class Certificate:
    """What is proved of a rewritten step; true if nothing is left open.

    Args:
        proved: the outputs and the written tensors that have unchanged bits: the loss, gradients by FQN,
            buffers.
        unproved: what no rule could follow, and why.
        axioms: what the proof takes for granted, by name.
        launches: the collectives, in order, as all ranks must have them; a captured step compares them when it is
            first called.
        seconds: how long the proof took.
        rounding: likewise of the graphs before and after each pass that may round, by what made them.
    """

    proved: tuple[str, ...]
    unproved: tuple[tuple[str, str], ...]
    axioms: Mapping[str, str]
    launches: tuple[Launch, ...]
    seconds: float
    rounding: Mapping[str, tuple[Launch, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.unproved

    @property
    def summary(self) -> str:
        """How much is proved and how much is not, in a line."""
        counts = f"{len(self.proved)} values proved equal in bits, {len(self.unproved)} not proved"
        return f"{counts}; ms: {self.seconds * 1e3:.1f}"

    def not_proved(self) -> list[str]:
        """Returns a line for each reason why something is not proved, with what it is."""
        names: dict[str, list[str]] = {}
        for name, why in self.unproved:
            names.setdefault(why.splitlines()[0], []).append(name)
        return [f"not proved: {some(its, limit=3)}: {why}" for why, its in names.items()]

    def __str__(self) -> str:
        unproved = [f"not proved: {name}: {why}" for name, why in self.unproved]
        granted = [f"taken for granted: {name}: {statement}" for name, statement in self.axioms.items()]
        return "\n  ".join([self.summary, *unproved, *granted])


def joined(certificates: Sequence[Certificate]) -> Certificate:
    """Returns what certificates of a step's rewrites, one after the other, say of all of them."""
    *first, last = certificates
    if not first:
        return last
    axioms = {name: text for each in certificates for name, text in each.axioms.items()}
    return Certificate(
        tuple(name for name in last.proved if all(name in each.proved for each in first)),
        tuple(dict.fromkeys(found for each in certificates for found in each.unproved)),
        axioms,
        last.launches,
        sum(each.seconds for each in certificates),
    )
