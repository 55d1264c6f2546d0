"""A captured step, and those that were captured again for batches by which ``loss_fn`` decides otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from graphpasses._torch.fsdp2_accumulation import accumulation_set_aside
from graphpasses.errors import CaptureError
from graphpasses.graph.batch import same_leaves
from graphpasses.graph.guards import NO_DECISION
from graphpasses.graph.rank_consensus import FailedRanks, RankConsensus
from graphpasses.graph.train_graph import GraphInput
from graphpasses.state.optimizer_checks import INSTEAD

Recapture: TypeAlias = Callable[..., Any]
"""Captures a step again, for a batch by which ``loss_fn`` decides otherwise.

Called as ``capture(model, *batch, counted=..., traced_everywhere=...)``: the numbers that are inputs until now, and
what it calls before the ranks run anything together.
"""

MAX_STEPS = 8


class FailedElsewhereError(CaptureError):
    """Another rank raised, and no rank waits for this one."""


Step: TypeAlias = Any
"""A :class:`~graphpasses.graph.CapturedStep`, which has one of these."""


class GuardedCache:
    """A captured step, and those captured again, each with its guards: all ranks run the same one at each call."""

    def __init__(self, first: Step) -> None:
        self.steps = [first]
        self._num_captured = 1
        self._device = next(first.model.parameters()).device
        self._consensus = RankConsensus.of_graph(first.graph, self._device)
        self.groups = self._consensus.groups  # the names of those with which the step communicates
        self.failed_ranks = FailedRanks(self.groups)
        self._is_checked = False
        self._is_guarded = None if self.groups else self._is_decided

    def fitting(self, batch: tuple[Any, ...], leaves: Sequence[Any], value_of: Callable[[GraphInput], Any]) -> Step:
        """Returns the step that all ranks captured with what they decide by now, or captures it."""
        if not self._is_checked:
            update = self.steps[0].update
            name, norm = (None, None) if update is None else (update.optimizers.name, update.clip_norm)
            self._consensus.check_given(optimizer=name, clip_norm=norm)
            self.check_launches(self.steps[0])
            self._is_checked = True
        first, updates = self.steps[0], [] if self.steps[0].waits else [step.update for step in self.steps]
        if self._is_guarded is None:  # some rank may decide by what the others do not have
            self._is_guarded = not self._consensus.all_ranks([not self._is_decided])[0]
        same, shared = same_leaves(leaves), first.batch_structure.shared_in(batch)
        different = [step.batch_structure.sameness_difference(same, shared) for step in self.steps]
        if not self._is_guarded:
            if different[0] is None:
                return self.steps[0]
            if self.groups:  # the other ranks do not ask
                raise CaptureError(f"{different[0]}; capture a step for each of these cases, or give clones")
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            all_guards = [step.guards for step in self.steps]
            decided = [None if each is None else each.difference(value_of) for each in all_guards]
        counted = [None if each is None else each.difference() for each in updates] or decided
        differences = [next(filter(None, each), None) for each in zip(different, decided, counted, strict=True)]
        fits = self._consensus.all_ranks([difference is None for difference in differences])
        if True in fits:
            return self.steps[fits.index(True)]
        found = next(filter(None, differences), "on another rank, loss_fn decided otherwise than it does now")
        step = self._capture(batch, found, INSTEAD[0].upper() + INSTEAD[1:] if found in counted else NO_DECISION)
        # The others hold a number constant that this one changes.
        if not self._consensus.all_ranks([step.counted == self.steps[0].counted])[0]:
            self.steps.clear()
        self.steps.append(step)
        return step

    @property
    def _is_decided(self) -> bool:
        """Whether ``loss_fn``, or the optimizer, decides by values that may be others at the next call."""
        first = self.steps[0]
        return first.guards is not None or (first.update is not None and first.update.decides_by_counts)

    def _capture(self, batch: tuple[Any, ...], difference: str, advice: str) -> Step:
        first = self.steps[0]
        if first.recapture is None:
            raise CaptureError(
                f"{difference}. Capture it with recapture=True, or capture a step for each of these cases"
            )
        if self._num_captured == MAX_STEPS:
            raise CaptureError(
                f"{difference}. The step was captured for {MAX_STEPS} such cases, and no more are kept. {advice}"
            )
        elsewhere = FailedElsewhereError("another rank could not capture the step again; its message says why")
        together = partial(self._consensus.raised_together, elsewhere)
        with together(), together() as traced_everywhere, torch.enable_grad():
            step = first.recapture(first.model, *batch, counted=first.counted, traced_everywhere=traced_everywhere)
        self._num_captured += 1
        step.seconds, step.recapture = first.seconds, first.recapture
        return self.rewritten(step, first.rewrites)

    def rewritten(self, step: Step, rewrites: Iterable[Callable[[Step], Step]]) -> Step:
        """Returns a step after rewrites; raises on all ranks if it launches different collectives on them."""
        with accumulation_set_aside(step.model):  # passes read how FSDP2 reduces
            for rewrite in rewrites:
                step = rewrite(step)
        self.check_launches(step)
        return step

    def check_launches(self, step: Step) -> None:
        """Raises on all ranks if they launch different collectives in a step."""
        self._consensus.check_proved_launches(None if step.report is None else step.report.certificate)
