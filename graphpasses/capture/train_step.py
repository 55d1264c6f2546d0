"""Capture forward, loss and backward of a training step as one graph, with torchtitan's tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graphpasses._torch.fake_mode import strides_of_kernels
from graphpasses._torch.fsdp2 import fsdp_groups, parameter_groups
from graphpasses._torch.fsdp2_settings import refuse_custom_communication
from graphpasses._torch.fsdp2_tracing import communication_traced, other_models_refused, prepare_for_tracing
from graphpasses._torch.operator_calls import OperatorCalls
from graphpasses.capture.attributes import trace_and_watch
from graphpasses.capture.eager_paths import eager_paths
from graphpasses.capture.guards import Decisions
from graphpasses.capture.live_state import live_state_restored
from graphpasses.capture.loss import check_loss
from graphpasses.capture.oracle import check_step, record_calls
from graphpasses.capture.outside_tensors import check_outside_tensors
from graphpasses.capture.random_state import check_random_state, random_state_traced
from graphpasses.capture.refusals import (
    kept_tensors_refused,
    refuse_collectives_in_place,
    refuse_model,
    refuse_sparse_gradients,
)
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep, GraphInput, InputKind
from graphpasses.graph.batch import check_leaf
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.recapture import Recipe
from graphpasses.identity import IdentityMap

__all__ = ["capture_train_step"]


def capture_train_step(
    loss_fn: Callable[..., torch.Tensor],
    model: nn.Module,
    *batch: Any,
    check: bool = True,
    recapture: bool = True,
) -> CapturedStep:
    """Captures one training step of ``model`` as a :class:`~graphpasses.graph.CapturedStep`.

    Nothing of the model changes: the step is traced on fake tensors, and compared with one eager step, after which
    all is put back. Every rank of the model's meshes must capture, with batches of the same shapes.

    Args:
        loss_fn: called as ``loss_fn(model, *batch)``; returns a scalar floating-point tensor. It must not
            call ``backward`` itself.
        model: a plain module or one that torchtitan's SimpleFSDP ``data_parallel`` has sharded, over tensor
            parallelism or not, on any device but meta.
        batch: example arguments: tensors, numbers, strings, None, or lists, tuples, mappings and dataclasses of them;
            ``loss_fn`` gets them as the types they are. Shapes, dtypes and plain values are fixed by the capture.
        check: whether the step is compared with one eager step on this batch, operator for operator; without real
            tensors it is not, and a note on the step says so.
        recapture: whether the step is captured again, at most eight times in all, when it is called with a batch by
            whose values ``loss_fn`` decides otherwise; else that is an error.

    Returns:
        The captured step. Parameters with ``requires_grad=False`` get no gradient; trainable ones that the
        loss does not depend on are listed in ``TrainGraph.without_gradient``.

    Raises:
        CaptureError: the loss is not a scalar tensor that depends on a trainable parameter, ``loss_fn``
            calls ``backward``, runs under autocast or decides by a value that does not follow from the batch, buffers
            and constants alone, the batch holds something
            else than tensors and plain values, or a tensor that requires a gradient, the model is on meta or has an
            LSTM that runs in oneDNN, or torchtitan is not installed; or the model is one that a captured step would
            train otherwise: wrapped (DistributedDataParallel, FSDP1), sharded by ``fully_shard`` or compiled, with
            hooks on gradients, or with a forward that replaces a buffer or keeps a tensor in an attribute.
        FidelityError: eager calls other operators than the traced step, or the same on other values.
        UnsupportedError: a parameter is sharded over several mesh axes otherwise than evenly by FSDP over tensor
            parallelism.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> step = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> loss = step(torch.ones(2, 4))
        >>> model.weight.grad.shape
        torch.Size([1, 4])
    """
    try:
        from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
    except ImportError as error:
        raise CaptureError(
            f"capture_train_step traces with torchtitan, which cannot be imported ({error}); "
            "install graphpasses[titan]"
        ) from error

    refuse_model(model)
    structure = BatchStructure.of(batch)
    leaves = structure.leaves(batch)
    for path, leaf in zip(structure.paths, leaves, strict=True):
        check_leaf(path, leaf)
    is_sharded = bool(parameter_groups(model))
    if is_sharded:
        refuse_custom_communication(fsdp_groups(model))
        prepare_for_tracing(model)
    names, identity = _state_names(model), IdentityMap.of(model)
    records: list[OperatorCalls] = []
    decisions = Decisions(model, list(zip(structure.paths, leaves, strict=True)))

    seeds: list[str] = []

    @random_state_traced(seeds)
    @eager_paths()
    def step(*args: Any) -> list[torch.Tensor | None]:
        # The tracer gives every name of a tied DTensor a tensor of its own, so ask for every name's gradient;
        # but names of one module, or of one plain tensor, still are one, whose gradient goes to the first.
        named = {
            fqn: parameter
            for fqn, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        gradients_before = [parameter.grad for parameter in named.values()]
        records.append(record := record_calls(model, identity, args))
        communication = (
            communication_traced(model) if is_sharded else nullcontext(dict[torch.Tensor, torch.Tensor]())
        )
        with decisions.watched(), communication as reduced:
            with _autocast_refused(), kept_tensors_refused(model), other_models_refused(model), record:
                loss = loss_fn(model, *structure.build(args))
            if _state_names(model) != names:
                raise CaptureError("the model's parameters, buffers or ties changed while loss_fn ran")
            if reduced or any(
                parameter.grad is not before
                for parameter, before in zip(named.values(), gradients_before, strict=True)
            ):
                raise CaptureError(_CALLED_BACKWARD)
            check_loss(loss, list(named))
            with record:
                gradients = _differentiate(
                    loss, list(dict.fromkeys(named.values())), reduced if is_sharded else None
                )
        return [loss, *(gradients.pop(parameter, None) for parameter in named.values())]

    try:
        with strides_of_kernels(), live_state_restored(model):
            traced, read = trace_and_watch(
                model, lambda: minimal_fx_tracer(step, module=model)(*map(_distinct, leaves))
            )
    finally:
        for record in reversed(records):
            record.undo()  # a tensor from outside that loss_fn writes is written while it is traced
    graph = read_traced_result(traced, model=model, read=read)
    graph.fixed_signature = False
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise CaptureError(
            "the model has an LSTM that runs in oneDNN, whose backward cannot be run from a graph; turn oneDNN off "
            "in both runs, with torch.backends.mkldnn.set_flags(False)"
        )
    check_random_state(graph, seeds)
    refuse_collectives_in_place(graph)
    refuse_sparse_gradients(graph)
    check_outside_tensors(graph)
    _name_batch(graph, structure)
    graph.guards = decisions.guards
    if recapture:
        graph.recipe = Recipe(partial(capture_train_step, loss_fn, check=check, recapture=False))
    if check:
        check_step(graph, loss_fn, batch, records[0].calls)
    return graph


def _differentiate(
    loss: torch.Tensor, parameters: list[torch.Tensor], reduced: dict[torch.Tensor, torch.Tensor] | None
) -> dict[torch.Tensor, torch.Tensor | None]:
    if reduced is None:
        return dict(zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))
    loss.backward()  # type: ignore[no-untyped-call]  # FSDP2 looks for gradients where backward leaves them
    return {parameter: reduced.get(parameter, parameter.grad) for parameter in parameters}


_CALLED_BACKWARD = (
    "loss_fn called backward itself; return the loss and let the capture differentiate it (a loss that runs "
    "backward chunk by chunk cannot be captured: sum the chunks' losses)"
)


def _state_names(model: nn.Module) -> list[str]:
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [fqn for fqn, _ in (*parameters, *buffers)]


@contextmanager
def _autocast_refused() -> Iterator[None]:
    def check(module: nn.Module, _: object) -> None:
        devices = {parameter.device.type for parameter in module.parameters(recurse=False)}
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, devices)):
            raise CaptureError(
                "loss_fn runs under autocast, which casts a weight once for all its uses and adds their gradients "
                "in the low precision; a captured step cannot follow. Use simple_fsdp(param_dtype=...) and FSDP2's "
                "MixedPrecisionPolicy, or torch.autocast(..., cache_enabled=False) in both runs"
            )

    # The tracer turns autocast's cache off, and with it what tells a default autocast from one without a cache.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
        torch.set_autocast_cache_enabled(cached)


def _distinct(leaf: Any) -> Any:
    """Returns a tensor of its own for each leaf: the tracer takes a tensor that is given twice for one input."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _name_batch(graph: CapturedStep, structure: BatchStructure) -> None:
    names = dict(zip((path for path, _ in graph.batch_leaves), structure.paths, strict=True))
    graph.inputs = tuple(
        GraphInput(item.kind, names[item.fqn]) if item.kind is InputKind.BATCH else item
        for item in graph.inputs
    )
    graph.written = frozenset(names.get(fqn, fqn) for fqn in graph.written)
    graph.batch_leaves = tuple((names[path], value) for path, value in graph.batch_leaves)
    graph.batch_structure = structure
