"""Capture forward, loss and backward of a training step as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from graphpasses._torch.fake_mode import fake_copies
from graphpasses._torch.fsdp2 import fsdp_groups, own_reduction, reshard
from graphpasses._torch.fsdp2_accumulation import accumulation_set_aside
from graphpasses._torch.fsdp2_parameters import one_shard_parameters
from graphpasses._torch.fsdp2_tracing import prepare_for_tracing
from graphpasses._torch.operator_recorder import recording_paused
from graphpasses._torch.strides_of_eager import Strides
from graphpasses._torch.symbols import learn_no_more
from graphpasses.capture.accumulation_hooks import NOTE
from graphpasses.capture.dynamic_shapes import read_dynamic_shapes, with_sizes_of_its_own
from graphpasses.capture.oracle import check_step, has_equal_bits, other_strides_of_eager, why_unchecked
from graphpasses.capture.refusals import NowTrainedError, refuse_arguments, refuse_model
from graphpasses.capture.step_check import check_on_batch
from graphpasses.capture.step_rules import find_written_groups, note_outside, outside_tensors, refuse_step
from graphpasses.capture.trace import trace_step
from graphpasses.capture.traced_result import read_step
from graphpasses.capture.update import find_update, trace_update
from graphpasses.capture.update_check import check_update
from graphpasses.embedding.torchrec.batches import TORCHREC
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.fsdp.canonical import CLIP_NOTE
from graphpasses.fsdp.plan import BucketPlan, premultiplied_note
from graphpasses.gc_pause import paused_gc
from graphpasses.graph import CapturedStep, InputKind, get_state
from graphpasses.graph.batch import check_leaf
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.guards import BY_PARAMETERS
from graphpasses.graph.launches import launches_as_traced
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.recapture import FailedElsewhereError
from graphpasses.graph.several_models import with_others
from graphpasses.graph.unsharded import check_written_groups
from graphpasses.progress import stage, stages_shown
from graphpasses.roomy_stack import with_roomy_stack
from graphpasses.state.carried import NONE_CARRIED, Carried, CarriedError
from graphpasses.state.draws import DrawnError
from graphpasses.state.kept_tensors import refuse_kept_tensors
from graphpasses.state.keys import same_tensors
from graphpasses.state.left_tensors import modes_of
from graphpasses.state.optimizers import Optimizers
from graphpasses.state.snapshot import Snapshot, check_unsharded, tensor_owner


def capture_train_step(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    *batch: Any,
    others: Sequence[nn.Module] = (),
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    clip_norm: float | None = None,
    dynamic_shapes: Any = None,
    check: bool = True,
    recapture: bool = True,
    check_every: int | Literal["sparse"] | None = None,
) -> CapturedStep:
    """Captures one training step of ``model`` as a :class:`~graphpasses.graph.CapturedStep`.

    Nothing of the model changes, but for buffers that forward lets require gradients: the step is traced on fake
    tensors, and compared with one eager step, after which all is put back. Every rank of the model's meshes must
    capture; batches may have a size of its own on each.

    Args:
        loss_fn: called as ``loss_fn(model, *batch)``; returns the loss, a scalar floating-point tensor, or a tuple
            that begins with it, or a dict or an object that has it as its ``loss``, as Hugging Face's models do. So
            does a call of the step. It must not call ``backward`` itself.
        model: one that ``fully_shard`` has sharded, FSDP2's ``replicate`` has replicated, or torchtitan's SimpleFSDP
            ``data_parallel``, over tensor parallelism or not, or a plain module; on any device but meta.
        batch: example arguments: tensors, numbers, strings, None, TorchRec's jagged and keyed tensors, or lists,
            tuples, mappings and dataclasses of them; ``loss_fn`` gets them as the types they are. Shapes, dtypes and
            plain values are fixed by the capture, but for a number that is another at a later call, see
            ``recapture``. The numbers of ids and of samples of TorchRec's types may vary,
            as may dim 0 of a tensor beside them that has as many elements as they have samples.
        others: models that ``loss_fn`` runs beside ``model``, as a frozen teacher, or a GAN's other network, sharded
            or not. The step reads their live tensors, gathers them in buckets of their own, and fills the gradients
            that they require, as eager does. Messages call tensors ``model.…`` and ``others.0.…`` then.
        optimizer: a :class:`torch.optim.Optimizer`, torch's or another, or a tuple of several over disjoint
            parameters, as Muon and AdamW: the step ends with the step of each, and with ``zero_grad()``. It reads
            hyperparameters and state when it runs: schedulers, ``load_state_dict`` and eager steps in between are
            followed. A step in which the optimizer makes its state is its own.
        clip_norm: largest norm of all gradients together, which are clipped to it before the optimizer's step as
            :func:`torch.nn.utils.clip_grad_norm_` does: those of ``model``, and of ``others`` those that the
            optimizer updates. None does not clip. ``step.grad_norm`` is what the norm was.
        dynamic_shapes: dims of the batch that may vary, as :func:`torch.export.export` takes them: an entry for each
            argument, nested like it, and for a tensor e.g. ``{1: torch.export.Dim("length", max=512)}``, or None.
            None for a value of TorchRec leaves it as above. A batch of sizes by which ``loss_fn``, or an operator,
            decides otherwise is captured again, see ``recapture``.
        check: whether the step is compared with one eager step on this batch, operator for operator; without real
            tensors it is not, and a note on the step says so.
        recapture: whether the step is captured again when it is called with a batch by whose values, or sizes,
            ``loss_fn`` decides otherwise, or of other shapes, or built otherwise (a key more, None in place of a
            tensor), or when something else is not what it was that the step has built in: at most eight times, and
            once more for every hundred calls. Numbers that changed, of the batch and elsewhere, are inputs of the
            step that is captured then. Else that is an error.
        check_every: every how many calls the step is compared with eager again, on that call's batch, see
            :meth:`CapturedStep.check`; ``"sparse"`` does so at calls 10, 100, 1,000 and so on; None never.

    Returns:
        The captured step. Parameters with ``requires_grad=False`` get no gradient; trainable ones that the
        loss does not depend on are listed in ``TrainGraph.without_gradient``.

    Raises:
        CaptureError: the loss is not a scalar tensor that depends on a trainable parameter; ``loss_fn`` calls
            ``backward``, runs under autocast, or decides by a value that does not follow from the batch, buffers and
            constants, nor is one of three comparisons of what parameters compute; the batch holds something else than
            tensors and plain values, or a tensor that requires a gradient; the model is on meta; or a captured
            step would train otherwise than eager, see the limits in the documentation.
        FidelityError: eager calls other operators than the traced step, or the same on other values.
        AgreementError: ranks were given different ``clip_norm``, ``recapture`` or ``check_every``, or optimizers of
            different classes; or their steps launch different collectives.
        UnsupportedError: a parameter is sharded over several mesh axes otherwise than evenly by FSDP over tensor
            parallelism, or a group of FSDP2 communicates in a way that a graph cannot.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> step = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> loss = step(torch.ones(2, 4))
        >>> model.weight.grad.shape
        torch.Size([1, 4])
    """
    refuse_arguments(loss_fn, model, *batch)
    if check_every not in (None, "sparse") and not (type(check_every) is int and check_every > 0):
        raise CaptureError(f'check_every is {check_every!r}; give a number of calls, "sparse", or None')
    model, optimizers = with_others(model, others), Optimizers.of(optimizer)
    # Without a check one rank may capture for others, which wait for its step.
    consensus = RankConsensus.of_model(model if check else nn.Module())
    name = None if optimizers is None else optimizers.name
    consensus.check_given(optimizer=name, clip_norm=clip_norm, recapture=recapture, check_every=check_every)
    capture = partial(_capture, loss_fn, optimizers=optimizers, clip_norm=clip_norm, recaptures=recapture)
    capture = partial(capture, dynamic_shapes=dynamic_shapes, check=check)
    # The eager step communicates: the other ranks would wait in it for one that could not trace.
    elsewhere = FailedElsewhereError("another rank could not capture the step; its message says why")
    with consensus.raised_together(elsewhere) as traced_everywhere:
        step = capture(model, *batch, traced_everywhere=traced_everywhere)
    return replace(step, recapture=capture if recapture else None, check_every=check_every)


@with_roomy_stack
def _capture(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    *batch: Any,
    optimizers: Optimizers | None,
    clip_norm: float | None,
    dynamic_shapes: Any,
    check: bool,
    recaptures: bool,
    traced_everywhere: Callable[[], None] = lambda: None,
    strides: Strides | None = None,
    carried: Carried = NONE_CARRIED,
    numbers: frozenset[str] = frozenset(),
    copies: bool = False,
) -> CapturedStep:
    """Captures a step that reduces all gradients of its own batch, whatever FSDP2 keeps or is to keep now.

    ``traced_everywhere`` is called before the ranks run anything together. A step that eager does not confirm is
    traced again with the ``strides`` of what eager computes: torch's fake kernels get those of some operators wrong.
    So is one that writes a parameter which FSDP2 gathers of one shard, which is a view of it unless it ``copies``.
    """
    again = partial(_capture, loss_fn, model, *batch, optimizers=optimizers, clip_norm=clip_norm)
    again = partial(again, dynamic_shapes=dynamic_shapes, check=check, traced_everywhere=traced_everywhere)
    again = partial(again, strides=strides, carried=carried, numbers=numbers, copies=copies, recaptures=recaptures)
    with accumulation_set_aside(model), stages_shown(), recording_paused():
        # Look
        refuse_model(model)
        structure = BatchStructure.of(batch, TORCHREC)
        kinds = zip(structure.paths, map(type, given := structure.leaves(batch)), strict=True)
        structure = replace(structure, numbers={path: kind for path, kind in kinds if path in numbers})
        leaves = structure.inputs(given)
        structure = replace(structure, shared=structure.shared_in(batch), same=same_tensors(leaves))
        for path, leaf in zip(structure.paths, leaves, strict=True):
            check_leaf(path, leaf)
        consensus = RankConsensus.of_model(model)
        groups = fsdp_groups(model)
        check_unsharded(groups)
        prepare_for_tracing(model)
        varying = read_dynamic_shapes(structure, leaves, dynamic_shapes)
        varying = {**varying, **with_sizes_of_its_own(carried.named())} if dynamic_shapes else varying
        unchecked = why_unchecked(model, dict(zip(structure.paths, leaves, strict=True))) if check else ""
        # Trace
        stage("traces loss_fn and its backward")
        with paused_gc():
            traced = partial(trace_step, loss_fn, model, structure, leaves, varying=varying, carried=carried)
            traced = partial(traced, strides=strides or {}, copies=copies, recaptures=recaptures)
            try:
                trace = traced(is_recorded=unchecked is None)
            except NowTrainedError as error:
                with ExitStack() as undo:  # as eager's first step does, and no more if this fails
                    for buffer in (get_state(model, fqn) for fqn in error.args):
                        undo.callback(buffer.requires_grad_, False)
                        buffer.requires_grad_()
                    step = again()
                    undo.pop_all()
                    return step
            except CarriedError as error:
                return again(carried=carried.and_also(*error.args))
            except DrawnError as error:
                return again(carried=replace(carried, draws=error.args))
            refuse_kept_tensors(trace.result)
        # Read
        step = read_step(
            trace.result,
            model,
            replace(structure, taken=tuple(trace.taken)),
            [
                *zip(structure.paths, fake_copies(leaves), strict=True),
                *zip(carried.paths, fake_copies(carried.read()), strict=True),
            ],
            trace.marks,
            left=trace.left,
            varying=varying,
            guards=trace.guards,
            left_unsharded=frozenset(trace.unsharded),
            left_values=trace.left_values,
            carried=carried.seen(),
            returned=trace.returned,
            hook_order=trace.hook_order,
            snapshot=Snapshot.of(
                model,
                trace.reads.attributes,
                trace.reads.names,
                trace.held,
                modes_of(trace.left_values.values),
                calls_hooks=True,
            ),
            checker=partial(check_on_batch, loss_fn),
        )
        if not copies and step.written & one_shard_parameters(model):
            return again(copies=True)
        # Refuse
        refuse_step(step, trace)
        step.written_groups = find_written_groups(step, trace.memory)
        check_written_groups(step.written_groups, step.left_unsharded)
        if outside := outside_tensors(step):
            step.note(note_outside(outside))
            step.snapshot.tensors = tuple(map(tensor_owner, outside))
        if groups and (note := premultiplied_note(BucketPlan.from_fully_shard(model).entries)):
            step.note(note)
        if clip_norm is not None and any(own_reduction(group) is not None for group in groups):
            step.note(CLIP_NOTE)
        if step.hook_order:
            step.note(NOTE)
        if step.guards is not None and any(item.kind is InputKind.PARAMETER for item in step.guards.inputs):
            step.note(BY_PARAMETERS.format(step.guards.num_operators))
        source = find_update(step, optimizers, clip_norm)
        if source is not None:
            stage("traces the optimizer's step")
        with paused_gc():
            update = None if source is None else trace_update(step, source)
        learn_no_more(step.graph)
        if update is not None:
            learn_no_more(update.module.graph)
        traced_everywhere()
        # Compare
        if check and consensus.groups:
            consensus.check_launches({"the step": launches_as_traced(step)})
        if unchecked:
            step.note(f"the capture was not compared with an eager step: {unchecked}")
        elif check:
            stage("compares the step with an eager one")
            others: Strides | None = None
            try:
                check_step(step, loss_fn, batch, trace.calls)
            except FidelityError:
                others = None if strides else other_strides_of_eager(step, loss_fn, batch)
                if others is None:
                    raise
            if others is not None:
                return again(strides=others)
            reshard(groups)
            if source is not None and update is not None and has_equal_bits(model):
                stage("compares the update with the optimizer's own")
                check_update(update, source)
            elif update is not None:
                step.note("the update was not compared with the optimizer's own: its bits may differ from run to run")
        return step if update is None else step.with_update(update)
