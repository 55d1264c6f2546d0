"""Where two recorded runs begin to differ: the step, the tensors, and what differs first. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from graphpasses.errors import CompareError
from graphpasses.parity.run_file import Loss, Run, StepRecord
from graphpasses.text import did_you_mean, some

if TYPE_CHECKING:
    from graphpasses.fsdp.layout import Layout
    from graphpasses.fsdp.layout_diff import Move

GapKind = Literal["torch", "seed", "model", "ranks", "topology", "steps", "tensors", "losses", "gradients"]
"""What two runs may have recorded unalike."""
GAP_KINDS: tuple[GapKind, ...] = get_args(GapKind)


@dataclass(frozen=True)
class Gap:
    """Something that two runs did not record in the same way, so that it cannot be compared."""

    kind: GapKind
    text: str


@dataclass(frozen=True)
class StepDifference:
    """What differs in one step of two runs; true if anything does."""

    step: int
    loss: bool | None  # whether the losses differ; None if they could not be compared
    gradients: tuple[str, ...] | None  # FQNs whose gradients differ; None if they could not be compared
    weights: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.loss or self.gradients or self.weights)


@dataclass(frozen=True)
class Divergence(StepDifference):
    """The first step in which two runs differ."""

    a: StepRecord  # what each run recorded of it
    b: StepRecord
    # Where the layouts put the differing parameters' gradients, if the places differ; empty without layouts.
    moves: tuple[Move, ...]

    @property
    def first(self) -> Literal["loss", "gradients", "weights"]:
        """What differs first, in the order in which a step computes the loss, the gradients and the weights."""
        return "loss" if self.loss else "gradients" if self.gradients else "weights"

    @property
    def losses(self) -> tuple[Loss, Loss] | None:
        """Each run's, if both recorded any."""
        return (self.a.loss, self.b.loss) if self.a.loss and self.b.loss else None


@dataclass(frozen=True)
class Comparison:
    """What comparing two runs found."""

    a: Run
    b: Run
    num_steps: int  # number of steps that both have
    divergence: Divergence | None  # the first of them that differs; None if all are equal
    gaps: tuple[Gap, ...]  # what the runs did not record in the same way, as far as that was not allowed
    notes: tuple[str, ...]  # what else was not compared, and why

    @property
    def verdict(self) -> Literal["equal", "different", "not compared"]:
        """Whether the runs are equal, or differ; "not compared" if nothing differs, but they have gaps."""
        if self.divergence is not None:
            return "different"
        return "not compared" if self.gaps else "equal"

    @property
    def equal(self) -> bool:
        """Whether both runs recorded the same things for the same steps, and all are equal."""
        return self.verdict == "equal"


def compare_runs(a: Run, b: Run, *, allow: Collection[str] = ()) -> Comparison:
    """Finds the first step in which two runs differ, and what differs there.

    The runs may have different numbers of ranks, since hashes do not depend on sharding.

    Args:
        a: a run.
        b: another run of the same model.
        allow: kinds of gaps that are only noted: what the runs have in common decides whether they are equal. One or
            more of :data:`GAP_KINDS`: other versions of "torch", "seed"s, "model"s, a "topology" or numbers of
            "ranks" (then each rank's loss is not compared); "steps", "tensors", "losses" or "gradients" of one
            run alone.

    Returns:
        The first difference, or that there is none in what both have.

    Raises:
        CompareError: torch versions or seeds differ and that is not allowed, a step holds nothing that both have, or
            the runs have no step in common.

    Example:
        >>> from graphpasses.parity import ParityRecorder, read_run
        >>> import tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> with ParityRecorder(path) as recorder:
        ...     recorder.record(0, 1.0, torch.nn.Linear(2, 2))
        >>> compare_runs(read_run(path), read_run(path)).equal
        True
    """
    if unknown := sorted(set(allow) - set(GAP_KINDS)):
        known = ", ".join(map(repr, GAP_KINDS))
        raise CompareError(f"cannot allow {unknown[0]!r}; allow {known}{did_you_mean(unknown[0], GAP_KINDS)}")
    common, gaps = _common_steps(a, b), [*_gaps_of_runs(a, b)]
    for gap in gaps:
        if gap.kind in ("torch", "seed") and gap.kind not in allow:
            raise CompareError(gap.text)
    gaps += _gaps_of_steps(common)
    divergence = None
    for x, y in common:
        difference = _difference(x, y, _same_ranks(a, b))
        if difference.loss is None and difference.gradients is None and not x.weights.keys() & y.weights.keys():
            raise CompareError(
                f"step {x.step} has neither losses of as many ranks nor gradients nor weights that both runs recorded"
            )
        if divergence is None and difference:
            moves = _moves(difference, a.header.layouts, b.header.layouts)
            divergence = Divergence(**vars(difference), a=x, b=y, moves=moves)
    notes = [gap.text for gap in gaps if gap.kind in allow]
    if (a.header.layouts is None) != (b.header.layouts is None):
        notes.append(f"only run {'B' if a.header.layouts is None else 'A'} recorded its bucket layouts")
    refused = tuple(gap for gap in gaps if gap.kind not in allow)
    return Comparison(a, b, len(common), divergence, refused, tuple(notes))


def step_differences(a: Run, b: Run) -> list[StepDifference]:
    """Says for every step that two runs have in common what differs in it."""
    return [_difference(x, y, _same_ranks(a, b)) for x, y in _common_steps(a, b)]


def _same_ranks(a: Run, b: Run) -> bool:
    return a.header.world_size == b.header.world_size


def _common_steps(a: Run, b: Run) -> list[tuple[StepRecord, StepRecord]]:
    steps_b = {record.step: record for record in b.steps}
    common = [(record, steps_b[record.step]) for record in a.steps if record.step in steps_b]
    if not common:
        raise CompareError(f"the runs have no step in common: A has {_steps(a)}, B has {_steps(b)}")
    return common


def _gaps_of_runs(a: Run, b: Run) -> Iterator[Gap]:
    x, y = a.header, b.header
    if x.torch != y.torch:
        advice = "bits are only comparable on one version; record both on the same"
        yield Gap("torch", f"the runs used torch {x.torch} and torch {y.torch}: {advice}")
    if x.seed != y.seed:
        yield Gap("seed", f"the runs began with seeds {x.seed} and {y.seed}: record both with one")
    if x.model != y.model:
        yield Gap("model", f"the runs are of models {x.model!r} and {y.model!r}")
    if x.world_size != y.world_size:
        what = "each rank's loss is not compared, weights and gradients are"
        yield Gap("ranks", f"the runs have {x.world_size} and {y.world_size} ranks: {what}")
    if x.topology != y.topology and x.topology and y.topology:
        one, two = ({"cluster": h.topology} if not isinstance(h.topology, dict) else h.topology for h in (x, y))
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        unlike = "; ".join(f"{name}: {one.get(name)} and {two.get(name)}" for name in names)
        yield Gap("topology", f"the runs' clusters differ ({unlike}): sums may be others")
    for name, run, other in (("A", a, b), ("B", b, a)):
        if not run.complete:
            yield Gap("steps", f"run {name} was cut short: it has {_steps(run)}")
        others = {record.step for record in other.steps}
        if num_only := sum(record.step not in others for record in run.steps):
            yield Gap("steps", f"{num_only} steps of run {name} are not in the other")


def _gaps_of_steps(common: Sequence[tuple[StepRecord, StepRecord]]) -> list[Gap]:
    """Finds what only one run recorded of a step; of a kind the first is enough."""
    found: dict[GapKind, Gap] = {}
    for x, y in common:
        for gap in _gaps_of_step(x, y):
            found.setdefault(gap.kind, gap)
    return list(found.values())


def _gaps_of_step(x: StepRecord, y: StepRecord) -> Iterator[Gap]:
    yield from _other_names("weights", x.step, x.weights, y.weights)
    if _both_have_gradients(x, y):
        yield from _other_names("gradients", x.step, x.gradients, y.gradients)
    has: dict[GapKind, list[bool]] = {
        "gradients": [any(each.gradients.values()) for each in (x, y)],
        "losses": [each.loss is not None for each in (x, y)],
    }
    for kind, (in_a, in_b) in has.items():
        if in_a != in_b:
            yield Gap(kind, f"only run {'A' if in_a else 'B'} has {kind}, first in step {x.step}")


def _other_names(what: str, step: int, x: Mapping[str, str | None], y: Mapping[str, str | None]) -> Iterable[Gap]:
    sides = [
        f"only {run} has {some(list(map(repr, sorted(names))), limit=3)}"
        for run, names in (("A", x.keys() - y.keys()), ("B", y.keys() - x.keys()))
        if names
    ]
    if sides:
        yield Gap("tensors", f"the runs have other {what} in step {step}: {'; '.join(sides)}")


def _both_have_gradients(x: StepRecord, y: StepRecord) -> bool:
    return any(x.gradients.values()) and any(y.gradients.values())


def _difference(x: StepRecord, y: StepRecord, same_ranks: bool) -> StepDifference:
    is_compared = _both_have_gradients(x, y) and x.gradients.keys() & y.gradients.keys()
    gradients = _differing(x.gradients, y.gradients) if is_compared else None
    loss = (x.loss.dtype, x.loss.bits) != (y.loss.dtype, y.loss.bits) if x.loss and y.loss and same_ranks else None
    return StepDifference(x.step, loss, gradients, _differing(x.weights, y.weights))


def _differing(x: Mapping[str, str | None], y: Mapping[str, str | None]) -> tuple[str, ...]:
    return tuple(name for name in x if name in y and x[name] != y[name])


def _moves(difference: StepDifference, a: Layout | None, b: Layout | None) -> tuple[Move, ...]:
    """Returns what moved of the gradients of the parameters that differ."""
    if a is None or b is None:
        return ()
    from graphpasses.fsdp.layout_diff import diff_layouts  # imports torch, as the layouts have

    moves: dict[str, list[Move]] = {}
    for move in diff_layouts(a, b).moves:
        moves.setdefault(move.fqn, []).append(move)
    fqns = dict.fromkeys((*(difference.gradients or ()), *difference.weights))
    return tuple(move for fqn in fqns for move in moves.get(fqn, ()))


def _steps(run: Run) -> str:
    if not run.steps:
        return "no steps"
    return f"{len(run.steps)} steps, {run.steps[0].step} to {run.steps[-1].step}"
