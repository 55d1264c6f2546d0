"""The first operator at which two recorded steps part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphpasses._torch.recorded_operator import Operator, Phase, Value
from graphpasses.parity.operators import OperatorStep

_COMMUNICATION = "fsdp."  # what FSDP2 does, and a graph does by other operators
# Their order; reductions and what else is done to gradients take turns.
_PHASES: dict[Phase, int] = {
    "": 0,
    "forward": 0,
    "loss": 1,
    "backward": 2,
    "reduction": 3,
    "gradients": 3,
    "optimizer": 4,
}
_TO_PYTHON = "aten._local_scalar_dense.default"  # a program may branch by what it says
_Kind = Literal["start", "result", "inputs", "missing", "extra"]


@dataclass(frozen=True)
class Difference:
    """Where two runs of one step part, on one rank.

    Args:
        kind: "start", they begin with other values; "result", an operator reads the same and makes something else;
            "inputs", it reads something else, though all that was computed before is equal; "missing", B never
            computes what A's operator does; "extra", A never computes what B's does.
        step: number of the step.
        rank: the rank.
        a: the operator in the first run; None for "start", and where it has none.
        b: the operator in the second run; None for "start", and where it has none.
        values: names of what differs: of the operator's inputs or outputs, or of what the step began with.
        epoch: how many collectives the rank had called before.
    """

    kind: _Kind
    step: int
    rank: int
    a: Operator | None
    b: Operator | None
    values: tuple[str, ...]
    epoch: int = 0

    @property
    def operator(self) -> Operator | None:
        """The operator, as run A calls it, or B where A does not."""
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
        return text


def first_difference(a: OperatorStep, b: OperatorStep) -> Difference | None:
    """Finds where a rank's operators in two runs of one step first part; None if nowhere.

    Calls are the same if they call one operator on the same bits, wherever they stand: passes reorder. What differs
    and is made good before the step ends, as where two operators are fused to one, does not count. What only B
    computes is named where it comes before all that B lacks.
    """
    start = differing(a.start, b.start)
    if start:
        return Difference("start", a.step, a.rank, None, None, start)
    run_a, run_b = _Run(a), _Run(b)
    partners = _partners(run_a, run_b)
    names, others = ({each.name for each in step.end} for step in (a, b))
    ends = (*differing(a.end, b.end), *sorted(names ^ others))  # a gradient may be there in one alone
    ours = _first(run_a, run_b, set(partners), set(partners.values()), ends)
    theirs = _first(run_b, run_a, set(partners.values()), set(partners), ends)
    if theirs is not None:
        theirs = replace(theirs, a=theirs.b, b=theirs.a)
        if theirs.kind == "missing":
            theirs = replace(theirs, kind="extra", values=ends)
        if ours is None or _is_before(theirs, ours, partners, run_b):
            return theirs
    if ours is None and ends:
        return Difference("extra", a.step, a.rank, None, None, ends)
    return ours


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
    """What a run computed, to look for the like of another run's operators, and what reads it."""

    def __init__(self, step: OperatorStep) -> None:
        self.step = step
        self.values = {each.digest for each in (*step.start, *step.end)}
        self._forward = set(self.values)  # what backward computes again may be right where forward is not
        self.calls: dict[tuple[object, ...], list[Operator]] = defaultdict(list)
        self.communicates = False
        # Of what each operator made or wrote, who reads what.
        self.readers: dict[int, list[tuple[Operator, Value]]] = defaultdict(list)
        self._makers: dict[object, int] = {}  # the last one's position, by memory and by digest
        for each in step.operators:
            for values in (self.values,) if each.where.in_backward else (self.values, self._forward):
                values.update(_digests((*each.inputs, *each.outputs)))
            self.calls[_call(each)].append(each)
            self.communicates |= each.operator.startswith(_COMMUNICATION)
            for value in each.inputs:
                for maker in self.makers([value]):
                    self.readers[maker].append((each, value))
            for value in each.outputs:
                self._makers.update(dict.fromkeys(_keys(value), each.position))

    def makers(self, values: Iterable[Value]) -> Iterator[int]:
        """Yields the positions of the operators that last wrote what holds some values, or else made such values."""
        for value in values:
            if (key := next((key for key in _keys(value) if key in self._makers), None)) is not None:
                yield self._makers[key]

    def has(self, each: Operator, values: Iterable[Value]) -> bool:
        """Whether this run has, anywhere in forward or backward, values that another's operator reads or makes."""
        return set(_digests(values)) <= (self.values if each.where.in_backward else self._forward)

    def cannot_have(self, each: Operator) -> bool:
        """Whether a graph computes what FSDP2 does in an operator by others, of which hashes say nothing."""
        is_other = each.operator.startswith(_COMMUNICATION) and not self.communicates
        return is_other and not self.has(each, each.outputs)


def _partners(a: _Run, b: _Run) -> dict[int, int]:
    """Returns by positions in A those in B of like calls with like results, in the same module if there is one."""
    left = {call: list(operators) for call, operators in b.calls.items()}
    partners: dict[int, int] = {}
    for is_near in (True, False):
        for each in (each for each in a.step.operators if each.position not in partners):
            same = left.get(_call(each), [])
            likes = (other for other in same if not _differing_outputs(each, other))
            like = next((o for o in likes if not is_near or o.where.module == each.where.module), None)
            if like is not None:
                partners[each.position] = like.position
                same.remove(like)
    return partners


def _first(
    run: _Run, other: _Run, matched: set[int], matched_there: set[int], ends: Sequence[str]
) -> Difference | None:
    """Returns the first operator of a run that has no like in the other and by which they end unlike."""
    step = run.step
    calls = defaultdict[tuple[object, ...], list[Operator]](list)
    places = defaultdict[tuple[object, ...], list[Operator]](list)
    for each in (each for each in other.step.operators if each.position not in matched_there):
        calls[_call(each)].append(each)
        for place in _places(each):
            places[place].append(each)
    counts = defaultdict[tuple[object, ...], int](int)
    found: dict[int, Difference] = {}
    unknown: set[int] = set()
    epoch = 0
    for each in step.operators:
        if each.position not in matched:
            if other.cannot_have(each):
                unknown.add(each.position)
            partner = None
            for place in _places(each):
                like = places.get(place, [])
                if partner is None and counts[place] < len(like):
                    partner = like[counts[place]]
                counts[place] += 1
            difference = _difference(each, partner, calls.get(_call(each), []), other)
            if difference is not None:
                kind, theirs, values = difference
                found[each.position] = Difference(kind, step.step, step.rank, each, theirs, values, epoch)
        epoch += each.is_collective
    remaining = _not_made_good(run, other, found, unknown, ends)
    differences = [found[position] for position in sorted(remaining)]
    # Where a bucket is not filled, its reduction is missing, too.
    return next((each for each in differences if not _is_packed(each)), None)


def _is_packed(difference: Difference) -> bool:
    """Whether an operator that is missing fills the bucket of a reduction."""
    operator = difference.a
    assert operator is not None
    return difference.kind == "missing" and operator.where.phase == "reduction" and not operator.is_collective


def _is_before(theirs: Difference, ours: Difference, partners: dict[int, int], run_b: _Run) -> bool:
    """Whether what B begins otherwise comes before what A does, by the like calls before each."""
    assert theirs.b is not None
    assert ours.a is not None
    if run_b.cannot_have(ours.a):  # what FSDP2 does in an operator, a graph does in several
        return False
    last = max((mine for mine in partners if mine < ours.a.position), default=-1)
    last_there = max((mine for mine, other in partners.items() if other < theirs.b.position), default=-1)
    if last != last_there:
        return last_there < last
    phases = [_PHASES[each.where.phase] for each in (theirs.b, ours.a)]
    if phases[0] != phases[1]:
        return phases[0] < phases[1]
    return ours.b is not None and theirs.b.position < ours.b.position


def _difference(
    each: Operator, partner: Operator | None, same_call: Sequence[Operator], other: _Run
) -> tuple[_Kind, Operator | None, tuple[str, ...]] | None:
    if partner is not None and partner in same_call:
        return "result", partner, _differing_outputs(each, partner)
    if other.has(each, each.outputs) and (each.operator != _TO_PYTHON or partner is None):
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
    run: _Run, other: _Run, found: dict[int, Difference], unknown: set[int], ends: Sequence[str]
) -> set[int]:
    """Returns the positions of differences that reach what a step ends with, as far as memory and hashes can tell."""
    kept = set(run.makers(each for each in run.step.end if each.name in ends))
    remaining: set[int] = set()
    for each in reversed(run.step.operators):
        if each.position not in found:
            continue
        kind = found[each.position].kind
        # What one rank communicates otherwise may reach others alone; what Python reads, anything.
        is_seen = each.is_collective or each.operator == _TO_PYTHON
        stays = kind == "result" or (kind == "inputs" and is_seen)
        # A gradient may be kept as it is, though what is computed of it is equal again.
        is_kept = each.position in kept
        leads_on = any(
            (reader.position in remaining or reader.position in unknown) and not other.has(reader, [value])
            for reader, value in run.readers[each.position]
        )
        if stays or is_kept or leads_on:
            remaining.add(each.position)
    return remaining


def differing(a: Sequence[Value], b: Sequence[Value]) -> tuple[str, ...]:
    theirs = {each.name: each for each in b}
    return tuple(
        each.name
        for each in a
        if each.name in theirs and (each.kind, each.digest) != (theirs[each.name].kind, theirs[each.name].digest)
    )


def _call(each: Operator) -> tuple[object, ...]:
    return _spelling(each.operator), each.where.in_backward, tuple(value.digest for value in each.inputs)


def _places(each: Operator) -> Iterator[tuple[object, ...]]:
    """Yields where an operator is called, closest first."""
    name = _spelling(each.operator)
    named = each.arguments[:1] if name.startswith(_COMMUNICATION) else ()
    yield name, each.where.module, each.where.in_backward, each.where.line, named
    if each.where.module or named:
        yield name, each.where.module, each.where.in_backward, named


def _spelling(operator: str) -> str:
    """Returns one name for what computes in place and out of place."""
    return operator.replace("_.", ".", 1)


def _keys(value: Value) -> Iterator[object]:
    """Yields what tells who made a value: its bits in its memory, its memory, which may be a part of, or its bits."""
    if value.memory is not None:
        yield value.memory, value.digest
        yield value.memory
    if value.digest is not None:
        yield value.digest


def _digests(values: Iterable[Value]) -> Iterator[str]:
    return (each.digest for each in values if each.digest is not None)


def _differing_outputs(a: Operator, b: Operator) -> tuple[str, ...]:
    return tuple(
        x.name for x, y in zip(a.outputs, b.outputs, strict=False) if (x.digest, x.kind) != (y.digest, y.kind)
    )
