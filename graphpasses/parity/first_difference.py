"""The first operator at which two recorded steps part. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from graphpasses._torch.recorded_operator import Operator, Value
from graphpasses.parity.operators import OperatorStep

_COMMUNICATION = "fsdp."  # what FSDP2 does, and a graph does by other operators
_Kind = Literal["start", "result", "inputs", "missing", "extra"]


@dataclass(frozen=True)
class Difference:
    """Where two runs of one step part, on one rank.

    Args:
        kind: "start", they begin with other values; "result", an operator reads the same and makes something else;
            "inputs", it reads something else, though all that was computed before is equal; "missing", B never
            computes what A's operator does; "extra", only B calls it.
        step: number of the step.
        rank: the rank.
        a: the operator in the first run; None for "start" and "extra".
        b: the operator in the second run; None for "start", and where it has none.
        values: names of what differs: of the operator's inputs or outputs, or of what the step began with.
        epoch: how many collectives the rank had called before.
        maker: for "inputs", the operator of the second run that made what its operator reads, if one did.
    """

    kind: _Kind
    step: int
    rank: int
    a: Operator | None
    b: Operator | None
    values: tuple[str, ...]
    epoch: int = 0
    maker: Operator | None = None

    @property
    def operator(self) -> Operator | None:
        """The operator in the run that calls it."""
        return self.a or self.b

    @property
    def other_arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """What both give the operator beside tensors, as far as it differs; None if they give the same."""
        if self.a is None or self.b is None:
            return None
        ours, theirs = self.a.arguments, self.b.arguments
        only = (
            tuple(each for each in ours if each not in theirs),
            tuple(each for each in theirs if each not in ours),
        )
        return only if any(only) else None

    def __str__(self) -> str:
        where = f"rank {self.rank}, step {self.step}"
        if self.kind == "start":
            return f"{where}: the runs begin the step with other values: {', '.join(self.values)}"
        names = ", ".join(self.values)
        if self.operator is None:
            return f"{where}: all operators of run A are in run B, which yet ends with another {names}"
        what = {
            "result": f"reads the same in both runs, and its {names} differs",
            "inputs": f"reads something else in run B: {names}; all that was computed before is equal",
            "missing": "has no like in run B, which never computes its result",
            "extra": "is called by run B alone",
        }[self.kind]
        text = f"{where}: {self.operator} {what}"
        if self.other_arguments is not None:
            ours, theirs = (", ".join(each) or "nothing" for each in self.other_arguments)
            text += f" (A gives {ours}, B gives {theirs})"
        if self.maker is not None:
            text += f"; in run B it is made by {self.maker}"
        return text


def first_difference(a: OperatorStep, b: OperatorStep) -> Difference | None:
    """Finds where a rank's operators in two runs of one step first part, in the order of ``a``; None if nowhere.

    Calls are the same if they call one operator on the same bits, wherever they stand: passes reorder. What differs
    and is made good before the step ends, as where two operators are fused to one, does not count.
    """
    start = differing(a.start, b.start)
    if start:
        return Difference("start", a.step, a.rank, None, None, start)
    return _first(a, b) or _extra(a, b)


def first_of_ranks(differences: Iterable[Difference]) -> Difference | None:
    """Returns the difference that came first: what a collective brings to other ranks comes later."""

    def order(each: Difference) -> tuple[object, ...]:
        operator = each.operator
        if each.kind == "start" or operator is None:
            return (-1,)
        # Where a collective's result differs on all ranks, the cause is where something else differs, too.
        is_own = not operator.is_collective or each.kind != "result" or each.other_arguments is not None
        return (each.epoch, not is_own, operator.position, each.rank)

    return min(differences, key=order, default=None)


class _Run:
    """What a run computed, to look for the like of another run's operators."""

    def __init__(self, step: OperatorStep) -> None:
        self.values = {each.digest for each in (*step.start, *step.end)}
        self._forward = set(self.values)  # what backward computes again may be right where forward is not
        self.calls: dict[tuple[object, ...], list[Operator]] = defaultdict(list)
        self.communicates = False
        self._makers: dict[str, list[Operator]] = defaultdict(list)
        for each in step.operators:
            for values in (self.values,) if each.where.in_backward else (self.values, self._forward):
                values.update(_digests((*each.inputs, *each.outputs)))
            self.calls[_call(each)].append(each)
            self.communicates |= each.operator.startswith(_COMMUNICATION)
            for digest in _digests(each.outputs):
                self._makers[digest].append(each)

    def computes(self, each: Operator) -> bool:
        """Whether this run computes, anyhow and anywhere in forward or backward, what another's operator does."""
        return set(_digests(each.outputs)) <= (self.values if each.where.in_backward else self._forward)

    def cannot_have(self, each: Operator) -> bool:
        """Whether a graph computes what FSDP2 does in an operator by others, of which hashes say nothing."""
        is_other = each.operator.startswith(_COMMUNICATION) and not self.communicates
        return is_other and not self.computes(each)

    def maker_of(self, reader: Operator, names: Sequence[str]) -> Operator | None:
        """Returns the last operator that made one of some inputs of an operator; None if none did."""
        digests = _sources(each for each in reader.inputs if each.name in names)
        makers = (m for digest in digests for m in self._makers[digest] if m.position < reader.position)
        return max(makers, key=lambda each: each.position, default=None)

    def without_like(self, operators: Iterable[Operator]) -> list[Operator]:
        """Takes operators with like calls and results out of ``calls``; returns those that have no like there."""
        left: list[Operator] = []
        for each in operators:
            same = self.calls.get(_call(each), [])
            like = next((other for other in same if not _differing_outputs(each, other)), None)
            if like is None:
                left.append(each)
            else:
                same.remove(like)
        return left

    def by_place(self) -> dict[tuple[object, ...], list[Operator]]:
        """Returns what is left in ``calls``, in order, by where it is called."""
        places: dict[tuple[object, ...], list[Operator]] = defaultdict(list)
        left = (each for calls in self.calls.values() for each in calls)
        for each in sorted(left, key=lambda each: each.position):
            for place in _places(each):
                places[place].append(each)
        return places


def _first(a: OperatorStep, b: OperatorStep) -> Difference | None:
    other = _Run(b)
    left = {each.position for each in other.without_like(a.operators)}
    places, counts = other.by_place(), defaultdict[tuple[object, ...], int](int)
    found: dict[int, Difference] = {}
    unknown: set[int] = set()
    epoch = 0
    for each in a.operators:
        if each.position in left and other.cannot_have(each):
            unknown.add(each.position)
        if each.position in left:
            partner = None
            for place in _places(each):
                like = places.get(place, [])
                if partner is None and counts[place] < len(like):
                    partner = like[counts[place]]
                counts[place] += 1
            difference = _difference(each, partner, other)
            if difference is not None:
                kind, b_operator, values = difference
                maker = other.maker_of(b_operator, values) if kind == "inputs" and b_operator else None
                found[each.position] = Difference(
                    kind, a.step, a.rank, each, b_operator, values, epoch, maker
                )
        epoch += each.is_collective
    differs_at_end = differing(a.end, b.end)
    ends = {each.digest for each in a.end if each.name in differs_at_end}
    remaining = _not_made_good(a, found, unknown, ends)
    return next((found[each.position] for each in a.operators if each.position in remaining), None)


def _difference(
    each: Operator, partner: Operator | None, other: _Run
) -> tuple[_Kind, Operator | None, tuple[str, ...]] | None:
    same_call = other.calls.get(_call(each), [])
    if partner is not None and partner in same_call:
        return "result", partner, _differing_outputs(each, partner)
    if other.computes(each):
        return None
    if same_call:
        return "result", same_call[0], _differing_outputs(each, same_call[0])
    if other.cannot_have(each):  # what a graph gathers wrongly is seen where it is read
        known = set(_digests(each.inputs)) <= other.values
        return ("missing", None, ()) if known and each.where.in_backward else None
    if partner is None:
        return "missing", None, ()
    theirs = {value.name: value.digest for value in partner.inputs}
    names = tuple(v.name for v in each.inputs if theirs.get(v.name) != v.digest)
    return ("inputs", partner, names) if names else ("missing", partner, ())


def _not_made_good(
    a: OperatorStep, found: dict[int, Difference], unknown: set[int], ends: set[str | None]
) -> set[int]:
    """Returns the positions of differences that reach what a step ends with, as far as hashes can tell."""
    readers: dict[str, list[int]] = defaultdict(list)
    for each in (each for each in a.operators if each.position not in unknown):
        for digest in _sources(each.inputs):
            readers[digest].append(each.position)
    remaining: set[int] = set()
    for each in reversed(a.operators):
        if each.position not in found:
            continue
        later = [p for digest in _digests(each.outputs) for p in readers[digest] if p > each.position]
        kind = found[each.position].kind
        # What one rank communicates otherwise may reach others alone.
        stays = kind == "result" or (kind == "inputs" and each.is_collective)
        # A gradient may be kept as it is, though what is computed of it is equal again.
        is_kept = not ends.isdisjoint(_digests(each.outputs))
        if stays or is_kept or not later or any(p in remaining for p in later):
            remaining.add(each.position)
    return remaining


def _extra(a: OperatorStep, b: OperatorStep) -> Difference | None:
    """Returns what only B calls, if all that A computes is equal and the step yet ends with something else."""
    names = differing(a.end, b.end)
    if not names:
        return None
    other, epoch = _Run(a), 0
    left = {each.position for each in other.without_like(b.operators)}
    for each in b.operators:
        if each.position in left and not other.computes(each):
            return Difference("extra", b.step, b.rank, None, each, names, epoch)
        epoch += each.is_collective
    return Difference("extra", b.step, b.rank, None, None, names, epoch)


def differing(a: Sequence[Value], b: Sequence[Value]) -> tuple[str, ...]:
    """Returns the names of values that two runs have, and that differ."""
    theirs = {each.name: each for each in b}
    return tuple(
        each.name
        for each in a
        if each.name in theirs
        and (each.kind, each.digest) != (theirs[each.name].kind, theirs[each.name].digest)
    )


def _call(each: Operator) -> tuple[object, ...]:
    return _spelling(each.operator), each.where.in_backward, tuple(value.digest for value in each.inputs)


def _places(each: Operator) -> Iterator[tuple[object, ...]]:
    """Yields where an operator is called, closest first."""
    name = _spelling(each.operator)
    named = each.arguments[:1] if name.startswith(_COMMUNICATION) else ()
    yield name, each.where.module, each.where.in_backward, each.where.line, named
    yield name, each.where.module, each.where.in_backward, named


def _spelling(operator: str) -> str:
    """Returns one name for what computes in place and out of place."""
    return operator.replace("_.", ".", 1)


def _digests(values: Iterable[Value]) -> Iterator[str]:
    return (each.digest for each in values if each.digest is not None)


def _sources(values: Iterable[Value]) -> Iterator[str]:
    """Yields under which hashes what is read may have been made."""
    return (digest for each in values for digest in (each.digest, each.base) if digest is not None)


def _differing_outputs(a: Operator, b: Operator) -> tuple[str, ...]:
    return tuple(
        x.name for x, y in zip(a.outputs, b.outputs, strict=False) if (x.digest, x.kind) != (y.digest, y.kind)
    )
