"""A captured step, and those that were captured again: for batches by which ``loss_fn`` decides otherwise, and for
what else the step had built in and is something else now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from graphpasses._torch.fsdp2_accumulation import accumulation_set_aside
from graphpasses.errors import AgreementError, CaptureError, GraphPassesError
from graphpasses.graph.certificate import Launch, find_unlike_launch
from graphpasses.graph.guards import NO_DECISION
from graphpasses.graph.launches import launches_as_traced
from graphpasses.graph.rank_consensus import ALONE_AFTER, FailedRanks, RankConsensus, nobody_asked
from graphpasses.state.keys import same_tensors
from graphpasses.state.optimizer_checks import INSTEAD

Recapture: TypeAlias = Callable[..., Any]
"""Captures a step again.

Called as ``capture(model, *batch, carried=..., numbers=..., traced_everywhere=...)``: the numbers that are inputs,
from elsewhere and of the batch, and what it calls before the ranks run anything together.
"""

MAX_STEPS = 8
_CALLS_FOR_ONE = 100  # of so many calls one may bring another step


class FailedElsewhereError(CaptureError):
    """Another rank raised, and no rank waits for this one."""


class _NeedsOthersError(CaptureError):
    """A step that one rank captured for itself does not go with what the others run."""


Step: TypeAlias = Any
"""A :class:`~graphpasses.graph.CapturedStep`, which has one of these."""


_ADVICE = {
    "loss_fn decided": NO_DECISION,
    " decided by ": INSTEAD[0].upper() + INSTEAD[1:],
}
_BUILT_IN_AT = (
    ". torch builds it in at {}, as the rate of an alpha dropout: change it seldom (there is a capture for every "
    "hundred calls), or compute with it, as noise * std"
)
_BY_NUMPY = ". What NumPy's functions compute of it is built in: give the step what they bring"
_ELSEWHERE = "on another rank, something is otherwise than it was"


_ALONE = (
    "on this rank alone, and the step for it launches other collectives than the other ranks do, or decides by "
    "values. Let loss_fn run the same modules on all ranks, or change that on all"
)


def _why_built_in(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return _BY_NUMPY if "ufunc" in text else f". It cannot be an input of the step: {text}"


def _launch_alike(step: Step, other: Step) -> bool:
    """Whether ranks may run one of two steps each."""

    def launches(each: Step) -> Sequence[Launch]:
        known = each.report is not None and each.report.certificate
        return known.launches if known else launches_as_traced(each)

    return find_unlike_launch(launches(step), launches(other)) is None


def _is_guarded(step: Step) -> bool:
    """Whether ``loss_fn``, or the optimizer, decides by values that may be others at the next call."""
    return step.guards is not None or (step.update is not None and step.update.decides_by_counts)


def _look(step: Step, batch: tuple[Any, ...]) -> tuple[CaptureError | None, Any, Sequence[Any] | None]:
    """Returns the error of what a step has built in that is something else now, or its model's tensors; and the
    leaves of the batch, if it is built as the step's.
    """
    given = None
    try:
        given = step.batch_structure.leaves(batch)
        return None, step.look(given), given
    except CaptureError as error:
        return error, None, given


class GuardedCache:
    """A captured step, and those captured again, each with its guards and with what it has built in of the model and
    of values from outside. All ranks run the same one at each call, or such as launch the same collectives.
    """

    def __init__(self, first: Step) -> None:
        self._first = self._last = first  # which ran last
        self._together = first  # which all ranks ran last
        self.steps = [first]  # the same on all ranks
        self.own: list[Step] = []  # this rank's
        self._nums_captured = Counter({False: 1})  # by whether this rank did alone: the others count theirs alike
        self._num_calls = 0
        self._built_in: set[str] = set()  # paths of numbers that no step reads as inputs
        self._why: dict[str, str] = {}  # by path of one that a step, or none, reads so
        self._device = next(nn.Module.parameters(first.model)).device
        self.consensus = RankConsensus.of_graph(first.graph, self._device)
        self.groups = self.consensus.groups  # the names of those with which the step communicates
        self.failed_ranks = FailedRanks(self.groups)
        self._is_checked = False
        self._is_guarded = None if self.groups else _is_guarded(first)

    def fitting(self, batch: tuple[Any, ...], *, waits: bool) -> tuple[Step, Any, Sequence[Any]]:
        """Returns the step that all ranks captured with what is so now, or captures it; its model's tensors; and the
        leaves of the batch. Where a gradient ``waits`` all ranks run the same step.
        """
        if waits:
            self._last = self._together
        self._num_calls += 1
        self.consensus.count_call()
        if not self._is_checked:
            update = self.steps[0].update
            name, norm = (None, None) if update is None else (update.optimizers.name, update.clip_norm)
            self.consensus.check_given(optimizer=name, clip_norm=norm)
            self.check_launches(self.steps[0])
            self._is_checked = True
        if self._is_guarded is None:  # some rank may decide by what the others do not have
            self._is_guarded = not self.consensus.all_ranks([not _is_guarded(self.steps[0])])[0]
        changed, tensors, given = _look(self._last, batch)
        if changed is None and given is not None and not self._is_guarded:
            if (different := self._decided(self._last, batch, given)) is None:
                return self._last, tensors, given
            if self.groups:
                changed = CaptureError(f"{different}; capture a step for each of these cases, or give clones")
        if changed is not None and self._last.recapture is None:
            raise changed
        # The others ask at each call where something is guarded.
        if changed is not None and not self._is_guarded and self.groups:
            if waits:
                if not self.consensus.all_come(changed):
                    raise changed
            elif (step := self._found_alone(batch)) is not None:
                self._last = step
                return self._looked_at(batch)
            elif not self.consensus.all_come(None, patience=ALONE_AFTER):
                try:
                    with nobody_asked():
                        self._capture_for(batch, given, changed, "")
                    return self._looked_at(batch)
                except _NeedsOthersError as error:  # the others may be late
                    if not self.consensus.all_come(error):
                        raise
        of_last = changed, given
        differences = [self._difference(s, batch, of_last if s is self._last else None) for s in self.steps]
        fits = self.consensus.all_ranks([difference is None for difference in differences])
        if True in fits:
            step = self.steps[fits.index(True)]
            if step is self._last and changed is None and given is not None:
                return step, tensors, given
            self._last = step
        else:
            self._capture_for(batch, given, changed, next(filter(None, differences), _ELSEWHERE))
        self._together = self._last
        return self._looked_at(batch)

    def run_checked(self, batch: tuple[Any, ...]) -> Any:
        """Compares the step with eager, and runs it; one rank raises what eager raises as a call that is not checked
        does: behind what comes before that.
        """
        try:
            self._first.check(*batch)
        except GraphPassesError:
            raise
        except Exception:
            if not self.groups:
                self._first.run(*batch)
            raise
        return self._first.run(*batch)

    @property
    def _is_alone(self) -> bool:
        """Whether nobody is asked of those with which the step communicates."""
        return self.consensus.groups != self.groups

    def _looked_at(self, batch: tuple[Any, ...]) -> tuple[Step, Any, Sequence[Any]]:
        given = self._last.batch_structure.leaves(batch)
        return self._last, self._last.look(given), given

    def _found_alone(self, batch: tuple[Any, ...]) -> Step | None:
        """Returns a step for a batch that launches what the last one does, which the others may go on with."""
        known = (*self.steps, *self.own)
        fitting = (each for each in known if self._difference(each, batch) is None)
        return next((each for each in fitting if _launch_alike(each, self._last)), None)

    def _difference(self, step: Step, batch: tuple[Any, ...], looked: tuple[Any, Any] | None = None) -> str | None:
        """Says why a step is not for a batch; of one of other sizes nothing is computed that decides. What a look
        has told is ``looked``, if there was one.
        """
        error, given = looked or _look(step, batch)[::2]
        return self._decided(step, batch, given) if error is None and given is not None else str(error)

    def _decided(self, step: Step, batch: tuple[Any, ...], given: Sequence[Any]) -> str | None:
        """Says what is decided otherwise than in a step."""
        structure = step.batch_structure
        found: str | None = structure.sameness_difference(same_tensors(given), structure.shared_in(batch))
        if found is None and step.guards is not None:
            found = step.guards.difference(step.value_of(given))
        if found is None and step.update is not None and not self._first.waits:
            found = step.update.difference()
        return found

    def _capture_for(
        self, batch: tuple[Any, ...], given: Sequence[Any] | None, changed: CaptureError | None, difference: str
    ) -> None:
        """Captures a step for what ``changed``, or else for a ``difference``."""
        if given is None:  # of those for this structure the last, whose numbers may be others now
            found = ((each, _look(each, batch)[2]) for each in reversed((*self.steps, *self.own)))
            self._last, given = next((pair for pair in found if pair[1] is not None), (self._last, None))
        try:
            self._capture(batch, given, difference if changed is None else str(changed))
        except (AgreementError, _NeedsOthersError):
            raise
        except Exception as error:
            if changed is None or str(error).startswith(str(changed)):
                raise
            failure = f"{changed}. It could not be captured again: {type(error).__name__}: {error}"
            raise type(changed)(failure) from error

    def _capture(self, batch: tuple[Any, ...], given: Sequence[Any] | None, difference: str) -> None:
        first, why = self._last, difference.partition(";")[0]
        if first.recapture is None:
            raise CaptureError(
                f"{difference}. Capture it with recapture=True, or capture a step for each of these cases"
            )
        num_captured = self._nums_captured[self._is_alone]
        if num_captured >= MAX_STEPS + self._num_calls // _CALLS_FOR_ONE:
            advice = next((f". {text}" for decider, text in _ADVICE.items() if decider in difference), "")
            advice = advice or next((why for path, why in self._why.items() if difference.startswith(path)), "")
            raise CaptureError(
                f"{difference}. The step was captured for {num_captured} such cases, and no more are kept{advice}"
            )
        step = self._captured_with_numbers(batch, given)
        step.seconds, step.recapture = first.seconds, first.recapture
        step = self.rewritten(step, first.rewrites)
        step.note(f"captured again: {why}")
        if self._is_alone:
            if _is_guarded(step) or not _launch_alike(step, first):
                raise _NeedsOthersError(f"{why}, {_ALONE}")
            self._nums_captured[True] += 1
            step.note(f"the other ranks did not capture it, and it was not compared with an eager step: {why}")
            self.own, self._last = [*self.own[-MAX_STEPS + 1 :], step], step
            return
        self._nums_captured[False] += 1
        # The others hold a number constant that this one changes, but for one that is built in for some values.
        numbers = {*first.carried.numbers} & {*step.carried.paths}
        if not self.consensus.all_ranks([{*step.carried.numbers} ^ numbers <= {*self._why}])[0]:
            self.steps.clear()
        self.steps = [*self.steps[-MAX_STEPS + 1 :], step]
        self._last = step
        self._is_guarded = not self.consensus.all_ranks([not any(map(_is_guarded, self.steps))])[0]

    def _captured_with_numbers(self, batch: tuple[Any, ...], given: Sequence[Any] | None) -> Step:
        """Captures a step of which numbers that are others now are inputs, since they may change again; but for those
        that it cannot read so. ``given`` are the batch's leaves, and may be such numbers; None of another structure.
        """
        first = self._last
        known = first.carried.that_can_be()
        numbers = first.snapshot.changed_values()
        of_batch = first.batch_structure.changed_numbers(given or (), first.batch_leaves)
        by_value = set[str]()  # paths of inputs that this capture decides by, as `if v == 0`, or has special code for
        while True:
            of_batch -= self._built_in | by_value
            known = known.without(by_value)
            also = [numbers[path] for path in numbers.keys() - self._built_in - by_value - {*known.paths}]
            carried = known.and_also(*also)
            is_last = self.consensus.all_ranks([not also and of_batch <= {*first.batch_structure.numbers}])[0]
            paths = {*carried.paths, *of_batch}
            try:
                return self._captured(batch, known if is_last else carried, of_batch)
            except AgreementError:
                raise
            except Exception as error:  # also torch's own, which cannot trace all that is computed of a number
                places: Mapping[str, str] = getattr(error, "paths", {})
                found = paths.intersection(places)
                goes_on = isinstance(error, FailedElsewhereError) or bool(found) or (bool(paths) and not is_last)
                if not self.consensus.all_ranks([goes_on])[0]:
                    raise
                if found:
                    by_value |= found
                    self._why |= {path: _BUILT_IN_AT.format(places[path]) for path in found}
                elif not isinstance(error, FailedElsewhereError):
                    self._built_in |= paths
                    self._why |= dict.fromkeys(paths, _why_built_in(error))

    def _captured(self, batch: tuple[Any, ...], carried: Any, numbers: frozenset[str]) -> Step:
        first = self._last
        elsewhere = FailedElsewhereError("another rank could not capture the step again; its message says why")
        together = partial(self.consensus.raised_together, elsewhere)
        with together(), together() as meet, torch.enable_grad():
            options: dict[str, Any] = {"carried": carried, "numbers": numbers, "traced_everywhere": meet}
            if self._is_alone:
                options["check"] = False  # an eager step would communicate
            return first.recapture(first.model, *batch, **options)

    def rewritten(self, step: Step, rewrites: Iterable[Callable[[Step], Step]]) -> Step:
        """Returns a step after rewrites; raises on all ranks if it launches different collectives on them."""
        with accumulation_set_aside(step.model):  # passes read how FSDP2 reduces
            for rewrite in rewrites:
                step = rewrite(step)
        self.check_launches(step)
        return step

    def check_launches(self, step: Step) -> None:
        """Raises on all ranks if they launch different collectives in a step."""
        self.consensus.check_proved_launches(None if step.report is None else step.report.certificate)
