"""A captured training step: a graph that is called with a batch and fills the live model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import fx, nn

from graphpasses._torch.fake_mode import active_fake_mode, is_fake
from graphpasses._torch.fx_graphs import copy_graph, lazy_module, quick_call
from graphpasses._torch.surroundings import never_compiled
from graphpasses.errors import CaptureError
from graphpasses.graph.accumulation import CutGraph, Cuts, CutSteps, Waiting
from graphpasses.graph.batch import Varying, check_leaves, check_memory
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.gradients import Gradients
from graphpasses.graph.guards import Guards
from graphpasses.graph.parameters import get_state, parameter_infos
from graphpasses.graph.recapture import GuardedCache, Recapture
from graphpasses.graph.returned import Returned
from graphpasses.graph.train_graph import GraphInput, InputKind, OutputKind, TrainGraph
from graphpasses.graph.unsharded import Unsharded
from graphpasses.graph.update import Update
from graphpasses.state.carried import Carried
from graphpasses.state.left_tensors import Left
from graphpasses.state.snapshot import Snapshot


@dataclass(repr=False, kw_only=True)
class CapturedStep(TrainGraph):
    """One training step (forward, loss and backward, and the update) that runs on the live model.

    ``loss = step(*batch)`` returns the loss and fills (or accumulates into) ``parameter.grad`` as ``loss.backward()``
    would, each tied parameter once. With an optimizer it also does what clipping, ``optimizer.step()`` and
    ``optimizer.zero_grad()`` would.

    Args:
        batch_structure: how the captured ``*batch`` is nested.
        batch_leaves: for each batch leaf: its path, and a fake tensor or the plain value captured.
        varying: by path of a leaf, the dims whose sizes may be others than those captured.
        snapshot: what the graph has built in: the model's structure, settings of torch and FSDP2, attributes and
            values from outside that the step's code reads; each call checks it.
        guards: what ``loss_fn`` decided by values of the batch; each call checks it, too. None if it decided nothing.
        recapture: how to capture the step again where one of these is otherwise now; None refuses it.
        rewrites: what the captured step then went through, e.g. pipelines.
        cuts: where FSDP2 may keep gradients unreduced, for a later step; None where that is not known.
        checker: compares a step with eager on a batch; None where there is no ``loss_fn``.
        left_unsharded: indexes of the FSDP2 groups that eager leaves unsharded, as a teacher's root, and so a call.
        left_values: what forward leaves beside tensors in attributes of modules, and so does a call.
        written_groups: by index, FSDP2 groups of which the step writes a parameter, and its FQN.
        carried: numbers and tensors that the step leaves and the next reads: inputs of the graph, behind the batch.
        returned: what a call returns beside the loss.
        hook_order: FQNs of gradients, in the order in which eager's backward fills them, if hooks wait; else ().
        check_every: of how many calls one is checked first; ``"sparse"`` for calls 10, 100, 1,000, …; None for none.
        grad_norm: the norm that all gradients had before the last call clipped them, a scalar; else None.

    Example:
        >>> import torch
        >>> from graphpasses import capture_train_step
        >>> model = torch.nn.Linear(4, 1)
        >>> step = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> loss = step(torch.ones(2, 4))
        >>> [list(parameter.grad.shape) for parameter in model.parameters()]
        [[1, 4], [1]]
    """

    batch_structure: BatchStructure
    batch_leaves: tuple[tuple[str, Any], ...]
    snapshot: Snapshot
    varying: Varying = field(default_factory=dict)
    guards: Guards | None = None
    recapture: Recapture | None = None
    rewrites: tuple[Callable[[Any], Any], ...] = ()
    cuts: Cuts | None = None
    checker: Callable[[CapturedStep, Sequence[Any]], None] | None = None
    left_unsharded: frozenset[int] = frozenset()
    written_groups: Mapping[int, str] = field(default_factory=dict)
    left_values: Left = field(default_factory=Left)
    carried: Carried = field(default_factory=Carried)
    returned: Returned = field(default_factory=Returned)
    hook_order: tuple[str, ...] = ()
    check_every: int | Literal["sparse"] | None = None
    grad_norm: torch.Tensor | None = field(default=None, init=False)
    _num_calls: int = field(default=0, init=False)

    @never_compiled
    def __call__(self, *batch: Any) -> Any:
        """Runs the step on the live model.

        Where ``loss_fn`` decides by values of the batch otherwise than when the step was captured, or something that
        the step has built in is something else now, it is captured again, on all ranks, and kept beside the first.
        Numbers that changed are inputs of the step from then on, if it can read them so.

        Args:
            batch: like the captured one: same structure (keys in any order), shapes, dtypes and plain values.

        Returns:
            What ``loss_fn`` returns: the loss, or that and other values; without autograd history: backward has run.

        Raises:
            BatchMismatchError: the batch differs from the captured one; the message names the leaf.
            CaptureError: it is called under ``torch.inference_mode``; or parameters changed while FSDP2 had them
                unsharded; or the step cannot be captured again, or must not be, or was eight times.
            FidelityError: the call is one that is checked, see :meth:`check`.
            AgreementError: another rank stopped, of which a collective waits; the message says why it did.
        """
        self._num_calls += 1
        with self._cache.failed_ranks.told():
            return self._cache.run_checked(batch) if self._is_due() else self.run(*batch)

    def accumulate(self, *batch: Any) -> Any:
        """Runs forward and backward of a microbatch, and leaves its gradients to the next call of the step.

        Nothing is reduced or updated: as under ``model.set_requires_gradient_sync(False)``, which a call obeys, too.
        Gradients wait where FSDP2 keeps them. The next call, or eager backward, adds them to its own.

        Args:
            batch: as for a call.

        Returns:
            As a call.

        Raises:
            CaptureError: as for a call; or the model's gradients cannot wait, as those of SimpleFSDP.

        Example:
            >>> import torch
            >>> from graphpasses import capture_train_step
            >>> model = torch.nn.Linear(4, 1)
            >>> step = capture_train_step(lambda model, x: model(x).mean(), model, torch.ones(2, 4))
            >>> loss = step.accumulate(torch.ones(2, 4))
            >>> loss = step(torch.zeros(2, 4))
        """
        with self.cut_steps.keeping():
            return self(*batch)

    @never_compiled
    def check(self, *batch: Any) -> None:
        """Compares the step with eager on a batch, as the capture did, and leaves everything as it was.

        Both run once. Loss, gradients, parameters, buffers, the optimizer's state and the batch must then have the
        same bits, whatever may have changed since the capture. All ranks must call it together.

        Args:
            batch: as for a call.

        Raises:
            FidelityError: on all ranks: one has other bits; that one's message says which.
            AgreementError: other ranks did not call it within five minutes.
            CaptureError: as for a call; or there is nothing to compare with: ``loss_fn`` is not known (a step of
                ``read_traced_result``), or eager's bits differ from run to run, or are not those of FSDP2.

        Example:
            >>> step = graphpasses.capture_train_step(lambda m, x: m(x).mean(), nn.Linear(4, 1), torch.ones(4))
            >>> step.check(torch.zeros(4))
        """
        if self.checker is None:
            raise CaptureError("the step was made of a trace, and knows no loss_fn that it could be compared with")
        left, norm = self._unsharded.left, self.grad_norm
        self._cache.consensus.check_all_compare()
        self._unsharded.shard()
        self.checker(self, batch)
        self._unsharded.unshard(left)
        self.grad_norm = norm

    def _is_due(self) -> bool:
        """Whether this call is one that is checked; the same on all ranks, which call a step equally often."""
        if self.check_every == "sparse":
            return len(digits := str(self._num_calls)) > 1 and digits == "1".ljust(len(digits), "0")
        return self.check_every is not None and self._num_calls % self.check_every == 0

    def run(self, *batch: Any) -> Any:
        """Does what a call does, and is never checked."""
        if torch.is_inference_mode_enabled():
            raise CaptureError("the step is called under inference_mode, where eager has no gradients; leave that")
        if active_fake_mode() is not None and not is_fake(next(nn.Module.parameters(self.model))):
            raise CaptureError(
                "loss_fn calls a captured step while it is captured itself; call what that step was captured of"
            )
        staying = self._staying()
        self._unsharded.shard(staying)
        waiting, pending = self.cut_steps.find_waiting()
        step, tensors, leaves = self.fitting(*batch, waits=waiting != Waiting())
        step = step.cut_steps.fitting(step, waiting)
        named = step.snapshot.structure.named(tensors, step.parameters)
        is_updatable = step.update is None or step.update.check(named)
        self._unsharded.unshard(staying | step.left_unsharded)
        step.carried.draw()
        returned = step.run_unchecked(tensors, leaves, pending, is_updatable=is_updatable)
        self.cut_steps.accumulators.clear(pending)
        self.grad_norm = step.grad_norm
        step.batch_structure.take(batch)
        return returned

    def fitting(self, *batch: Any, waits: bool = False) -> tuple[Self, list[torch.Tensor | None], list[Any]]:
        """Returns the capture that a call would run on a batch, the model's tensors, and what else it reads."""
        step, tensors, leaves = self._cache.fitting(batch, waits=waits)
        return step, tensors, step.read_inputs(leaves)

    def read_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns what the graph reads beside the model, for these leaves of a batch."""
        return [*self.batch_structure.inputs(leaves), *self.carried.read()]

    def look(self, leaves: Sequence[Any]) -> list[torch.Tensor | None]:
        """Returns the model's tensors, by slot; raises if the step is not for it, or for these leaves of a batch."""
        tensors = self.snapshot.check(self.model, self.carried.places, self.left_values.places.values())
        check_leaves(self.batch_structure.inputs(leaves), self.batch_leaves[: len(leaves)], self.varying)
        self.carried.check(self.batch_leaves[len(leaves) :], self.varying)
        return tensors

    def value_of(self, leaves: Sequence[Any]) -> Callable[[GraphInput], Any]:
        """Returns what tells the values of inputs, for these leaves of a batch."""
        given = dict(zip((path for path, _ in self.batch_leaves), self.read_inputs(leaves), strict=True))

        def value(item: GraphInput) -> Any:
            if item.kind is InputKind.BATCH:
                return given[item.fqn]
            tensor = get_state(self.model, item.fqn)
            return getattr(tensor, item.attr) if item.attr else tensor

        return value

    def _staying(self) -> frozenset[int]:
        """Returns the groups that eager leaves unsharded after a step."""
        kept = self._unsharded.kept(self.written_groups)
        if self.waits:  # another step follows before the parameters change
            return self.left_unsharded
        if kept and self.update is not None and self.update.clip_norm is not None:
            raise CaptureError(
                "set_reshard_after_backward(False) leaves parameters unsharded after backward, of which eager's "
                "clip_grad_norm_ finds no gradients, and clips none. Set it to True before the step that updates"
            )
        return self.left_unsharded | kept

    @property
    def captures(self) -> tuple[CapturedStep, ...]:
        """This step and those captured since, but for those that no call can take any more."""
        return (*self._cache.steps, *self._cache.own)

    @cached_property
    def _cache(self) -> GuardedCache:
        return GuardedCache(self)

    def record_rewrite(self, rewrite: Callable[[Any], Any]) -> None:
        """Records what made this step of another: what is captured again, or cut of it, goes through it, too."""
        self.rewrites += (rewrite,)

    def with_update(self, update: Update) -> Self:
        """Returns the step, as it was captured, with an update."""
        cuts = None if self.cuts is None else replace(self.cuts, update=update)
        return replace(self, update=update, cuts=cuts)

    @property
    def waits(self) -> bool:
        """Whether a call now leaves gradients to a later one, as :meth:`accumulate` does, and updates nothing."""
        return bool(self.cut_steps.accumulators.kept)

    def _with_graph(self, graph: CutGraph, update: Update | None) -> Self:
        """Returns the step with a graph that was cut of its captured one; it goes through what the step has."""
        module, inputs, outputs = graph
        step = replace(self, module=module, inputs=inputs, outputs=outputs, update=update, rewrites=())
        step.report, step.notes, step.timelines = None, [], []
        step = self._cache.rewritten(step, self.rewrites)
        step.cut_steps = self.cut_steps
        return step

    @cached_property
    def cut_steps(self) -> CutSteps[Self]:
        """Steps of the same capture that leave gradients unreduced, or reduce what was left."""
        trained = frozenset(self.parameters) - self.without_gradient
        return CutSteps(self.model, self.identity, trained, self.cuts, self.update is not None, self._with_graph)

    def run_unchecked(
        self,
        tensors: Sequence[torch.Tensor | None],
        leaves: Sequence[Any],
        pending: Mapping[str, torch.Tensor],
        *,
        is_updatable: bool = True,
    ) -> Any:
        """Runs the graph on a model's tensors, a batch's leaves and gradients that waited, which were found to fit.

        Unless it ``is_updatable`` the optimizer's own step makes its state, and updates.
        """
        update = self.update
        leaf = iter(leaves)
        values = [
            next(leaf) if slot is None else getattr(tensors[slot], attr) if attr else tensors[slot]
            for slot, attr in self._input_slots
        ]
        values += pending.values()
        if self.written:
            named = zip(self.inputs[: len(values)], values, strict=True)
            written = [(item.fqn, each) for item, each in named if item.fqn in self.written and item.is_tensor]
            check_memory(written, ((path, leaf) for (path, _), leaf in zip(self.batch_leaves, leaves, strict=True)))
        # The casts of the captured step are in its graph; autocast must not add others.
        uncast = torch.autocast(next(nn.Module.parameters(self.model)).device.type, enabled=False)
        if update is None:
            with torch.no_grad(), uncast:
                flat = self._call(*values)
            with torch.no_grad():  # as hooks run in backward
                return self._accumulate(flat, tensors)
        with torch.no_grad(), uncast:
            parameters = self.snapshot.structure.named(tensors, self.parameters)
            if not is_updatable:
                returned = self._accumulate((update.without_update or self.module)(*values), tensors)
                self.grad_norm = update.run_eagerly()
                return returned
            values += update.values(self.inputs[len(values) :], parameters)
            returned = self._accumulate(self._call(*values), tensors)
            self.grad_norm = update.run(parameters)
            return returned

    def __copy__(self) -> Self:
        return replace(self)

    def __deepcopy__(self, memo: object) -> Self:
        raise CaptureError(
            "a captured step is not copied with its model, whose copy the caller would not hold; copy the model, and "
            "use step.for_model(copy)"
        )

    def __reduce_ex__(self, protocol: object) -> str:
        raise CaptureError(
            "a captured step is not saved: it belongs to the live model and its process groups. Save the model's "
            "state_dict, and capture the step again"
        )

    def for_model(self, model: nn.Module, groups: Mapping[str, str] | None = None) -> Self:
        """Returns the step for another model that was built as the captured one was.

        Args:
            model: the other model.
            groups: the names of its process groups, by those of the captured one's, where they are others.

        Raises:
            CaptureError: the step updates its model by an optimizer, which has no other; or the models differ.
        """
        if self.update is not None:
            raise CaptureError(
                "the step has its model's optimizer in it; capture a step of the other model with its own optimizer"
            )
        parameters, snapshot = parameter_infos(model, self.identity), self.snapshot.for_model(model, groups or {})
        others = self.snapshot.structure.modules, snapshot.structure.modules, snapshot.attributes
        left, carried = self.left_values.for_model(*others), self.carried.for_model(*others)
        return replace(self, model=model, parameters=parameters, snapshot=snapshot, left_values=left, carried=carried)

    @cached_property
    def _unsharded(self) -> Unsharded:
        return Unsharded(self.model)

    @cached_property
    def _input_slots(self) -> tuple[tuple[int | None, str], ...]:
        slots = self.snapshot.structure.slots
        return tuple(
            (None if item.kind is InputKind.BATCH else slots[item.fqn], item.attr)
            for item in self.inputs
            if item.is_state or item.kind is InputKind.BATCH  # the optimizer's come last
        )

    @cached_property
    def _gradients(self) -> Gradients:
        return Gradients(self, self.snapshot.structure.slots, self.hook_order)

    @cached_property
    def _left(self) -> dict[OutputKind, list[tuple[int, str]]]:
        every = [(item.kind, (index, item.fqn)) for index, item in enumerate(self.outputs)]
        return {of: [each for kind, each in every if kind is of] for of in (OutputKind.LEFT, OutputKind.MEMORY)}

    @cached_property
    def _call(self) -> Callable[..., Any]:
        module = self.module if self.update is None else self._updating_module()
        return quick_call(module if self.runs_as is None else self.runs_as(module))

    def _updating_module(self) -> fx.GraphModule:
        """Returns the step with its update, without the gradients as results: they die once they are used."""
        graph = copy_graph(self.graph)
        values = [
            None if item.is_gradient and item.is_applied else value
            for item, value in zip(self.outputs, graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
        ]
        graph.output_node().args = (values,)
        return lazy_module(self.module, graph)

    def _accumulate(self, flat: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> Any:
        left = {fqn: flat[index] for index, fqn in self._left[OutputKind.LEFT]}
        with self.snapshot.own_writes(are_any=self.left_values.is_any(left)):
            self.left_values.leave(self.model, left)
        for index, fqn in self._left[OutputKind.MEMORY]:
            get_state(self.model, fqn).data = flat[index]
        self._gradients.leave(flat, tensors, self.cut_steps.accumulators)
        return self.returned.made_of(self.outputs, flat)
