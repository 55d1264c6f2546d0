"""Trace a training step as a model trains eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from graphpasses._torch.dynamo import compiled_calls_raise
from graphpasses._torch.fake_mode import is_fake, strides_of_kernels
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_tracing import communication_traced, other_models_refused
from graphpasses._torch.in_place_collectives import collectives_with_waits
from graphpasses._torch.module_answers import answers_as_in_eager, mark_parameters
from graphpasses._torch.module_hooks import accumulation_hooks, give_gradient_hooks, give_rnns_stand_ins
from graphpasses._torch.operator_calls import OperatorCalls
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.recorded_operator import Operator
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.sparse_fakes import elements_counted
from graphpasses._torch.step_tracer import TRACING, TracedFunction, held_traced, trace_with_torch
from graphpasses._torch.strides_of_eager import Strides, strides_known
from graphpasses._torch.surroundings import functions_behind
from graphpasses._torch.symbols import each_size_its_own, mark_dims
from graphpasses._torch.traced_floats import read_number
from graphpasses.capture import refusals
from graphpasses.capture.guards import Decisions
from graphpasses.capture.oracle import record_calls
from graphpasses.capture.random_state import random_state_traced
from graphpasses.capture.settled import trace_until_settled
from graphpasses.capture.traced_lines import module_names_traced
from graphpasses.errors import CaptureError
from graphpasses.graph.accumulation import Marks
from graphpasses.graph.batch import Varying
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.guards import Guards
from graphpasses.graph.kinds import GraphOutput, OutputKind
from graphpasses.graph.returned import Returned, loss_of
from graphpasses.graph.several_models import first_model
from graphpasses.identity import IdentityMap, find_state, named_state
from graphpasses.state.carried import Carried
from graphpasses.state.draws import Draw, DrawnError, draws_traced
from graphpasses.state.kept_tensors import caches_emptied_on_error
from graphpasses.state.left_tensors import Left, LeftTensors, live_state_restored, tensors_kept
from graphpasses.state.model import is_trained, structure_check, trained_state
from graphpasses.state.patterns import Known
from graphpasses.state.reads import Reads


@dataclass
class Trace:
    """What tracing a step brought; what a trace of it brings itself, of several is the last's, or the first's where
    the second call is another.
    """

    reads: Reads  # what the user's code read from outside
    draws: Sequence[Draw] | None = None  # what it draws from Python's and NumPy's generators; of the first trace
    seeds: list[str] = field(default_factory=list)  # the calls of ``loss_fn`` that seeded torch's generator
    held: set[str] = field(default_factory=set)  # FQNs of what the user's code also read by references of its own
    result: TracedFunction = field(init=False)  # the graph, and what its inputs and outputs are
    guards: Guards | None = field(init=False)  # the values by which ``loss_fn`` decided
    calls: list[Operator] = field(init=False)  # the operators that were called, in order, if they were recorded
    # What it leaves in buffers, attributes and tensors' ``data``: outputs before the marks.
    left: list[GraphOutput] = field(init=False)
    # Where FSDP2 may keep gradients unreduced: the last outputs of the traced function.
    marks: Marks = field(init=False)
    taken: Sequence[tuple[Any, ...]] = field(init=False)  # by which keys what ``loss_fn`` takes out is reached
    unsharded: Collection[int] = field(init=False)  # indexes of the FSDP2 groups that no backward frees
    # Of parameters that FSDP2 gathers, and their groups, by FQN.
    memory: Mapping[str, tuple[int, set[Any]]] = field(init=False)
    left_values: Left = field(init=False)  # Python values in attributes, and what is left elsewhere
    returned: Returned = field(init=False)  # what ``loss_fn`` returns; its tensors come behind those that it leaves
    trained_outside: Sequence[torch.Tensor] = field(init=False)  # what backward trains and the model does not have
    hook_order: tuple[str, ...] = ()  # FQNs of what backward gives gradients, in order, if hooks wait behind that


def trace_step(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    structure: BatchStructure,
    leaves: Sequence[Any],
    *,
    is_recorded: bool,
    varying: Varying,
    carried: Carried,
    strides: Strides,
    copies: bool,
    recaptures: bool,
) -> Trace:
    """Traces forward, loss and backward on fake tensors, and leaves the model as it was.

    The traced function returns the loss, one gradient, or None, for each trainable name of a parameter, what it
    leaves in modules, and what else ``loss_fn`` returns. It records the operators that are called if ``is_recorded``;
    ``varying`` are the dims of the batch whose sizes may vary, ``carried`` the attributes that are inputs, behind the
    batch, ``strides`` those of eager's results, if known. Whether a shard that is alone ``copies``, see
    :func:`communication_traced`. Whether it ``recaptures`` a step of which the second call finds something else.
    """
    identity, keeps_casts = IdentityMap.of(model), torch.is_autocast_cache_enabled()
    state = dict(named_state(model))
    is_ordered = any(map(accumulation_hooks, state.values()))
    records: list[OperatorCalls] = []
    all_left: list[Left] = []  # of each trace
    trace = Trace(reads := Reads(model, loss_fn))
    paths, leaves = (*structure.paths, *carried.paths), [*leaves, *carried.read()]
    before, carried = carried.own(), carried.seen()
    changing = (*structure.numbers, *carried.paths)
    named_leaves = list(zip(paths, leaves, strict=True))
    decisions = Decisions(model, named_leaves, varying, changing, carried.drawn, is_compared=is_recorded)

    def step(*args: Any) -> list[torch.Tensor | None]:
        args, numbers = args[: len(structure.paths)], [*args[len(structure.paths) :]]
        # The tracer gives every name of a tied DTensor a tensor of its own, so ask for every name's gradient;
        # but names of one module, or of one plain tensor, still are one, whose gradient goes to the first.
        named, order = trained_state(model), list[int]()
        for parameter in named.values():
            parameter.grad = None  # else backward adds to it
        trained = [(fqn, tensor, is_trained(tensor)) for fqn, tensor in named_state(model)]
        for fqn, tensor in named_state(model):
            for name, value in vars(state[fqn]).items():
                if name[0] != "_" and not hasattr(tensor, name):
                    setattr(tensor, name, value)
        give_rnns_stand_ins(model, state.get)
        for tensor, fqn in {tensor: fqn for fqn, tensor in named.items()}.items():
            give_gradient_hooks(state[fqn], tensor)
            if is_ordered:
                tensor.register_hook(partial(_note, order, id(tensor)))  # type: ignore[no-untyped-call]
        mark_parameters(model)

        def filled() -> dict[str, torch.Tensor]:
            """Returns the parameters, and buffers, that have gradients, by FQN."""
            return {fqn: parameter for fqn, parameter in named.items() if parameter.grad is not None}

        check_structure = structure_check(model, state)
        given = [args[index] for index in structure.same or range(len(args))]
        named_inputs = [*structure.inputs(given, lambda *number: None), *carried.tensors(numbers)]
        records.append(record := record_calls(model, identity, named_inputs, only_undo=not is_recorded))
        with (
            tensors_kept(model, dict(zip(structure.paths, given, strict=True))),
            caches_emptied_on_error(),
            refusals.other_threads_refused(),
            random_state_traced(trace.seeds),
            answers_as_in_eager(),
            collectives_with_waits(),
            decisions.watched(),
            refusals.assigned_memory(model, given) as assigned,
            refusals.gradients_refused(model),
            refusals.texts_refused(),
            communication_traced(model, copies=copies) as reductions,
            held_traced(state, dict(named_state(model)), trace.held),
            draws_traced(carried.draws, drawn := []) as draws,
        ):
            trace.draws = draws if trace.draws is None else trace.draws
            reductions.filled = order
            drawn += carried.write_traced(numbers)
            given = [*structure.inputs(given, read_number)]
            reads.count(carried.places)
            left_tensors = LeftTensors(model)
            with (
                _autocast_cached(model, keeps_casts=keeps_casts),
                other_models_refused(model),
                compiled_calls_raise(),
                module_names_traced(model),
                refusals.failures_placed(),
                reads.running(),
                record,
            ):
                batch = structure.build(given)
                containers = structure.containers(batch)[1:]
                result = loss_fn(first_model(model), *batch)
            check_structure()
            each_once = {id(container.value): container for container in containers}
            trace.taken = [keys for container in each_once.values() for keys in container.taken()]
            if different := {fqn for fqn, _ in named_state(model)} ^ state.keys():
                raise CaptureError(
                    f"loss_fn makes or removes {min(different)!r}, a parameter or buffer, and a captured step would "
                    "not. If it does so at the first call only, run loss_fn once before the capture"
                )
            for path, leaf in zip(structure.paths, given, strict=True):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    raise CaptureError(
                        f"loss_fn lets {path} require a gradient, by requires_grad_() or by what it writes into it, "
                        "and a captured step would not. Compute with another tensor: x.detach().requires_grad_(), or "
                        "x * y for x.mul_(y)"
                    )
            for fqn, tensor in assigned.items():
                if find_state(model, fqn) is not tensor:
                    raise CaptureError(f"loss_fn assigns to the .data of {fqn!r}, and replaces it; do one of both")
            refusals.refuse_now_trained(trained, [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)])
            if reductions.reduced or filled():
                raise CaptureError(_CALLED_BACKWARD)
            _check_loss(loss := loss_of(result), result, list(named))
            replacing = left_tensors.trained()
            trace.returned, others = Returned.of(result)
            parameters = list(dict.fromkeys(named.values()))
            outside = _outside_leaves(loss, parameters)
            trace.trained_outside = [each for each in outside if not any(map(is_fake, read_tensors(each)))]
            # In this thread alone calls are seen.
            with torch.autograd.set_multithreading_enabled(False), reads.running(), record:
                if fsdp_groups(model):  # FSDP2 looks for gradients where backward leaves them
                    with _gradients_put_back(outside):
                        loss.backward()
                    if read := [fqn for fqn, parameter in filled().items() if parameter in reductions.reduced]:
                        raise CaptureError(_READ_SHARD.format(read[0]))
                    gradients = {each: reductions.reduced.get(each, each.grad) for each in parameters}
                    also = [each.grad for each in replacing.values()]
                else:
                    computed = torch.autograd.grad(loss, [*parameters, *replacing.values()], allow_unused=True)
                    gradients, also = dict(zip(parameters, computed, strict=False)), [*computed[len(parameters) :]]
                    for fqn in filled():
                        raise CaptureError(_INNER_BACKWARD.format(fqn))
            check_structure()  # which hooks of backward may change, too
        for fqn, gradient in zip(replacing, also, strict=True):
            if gradient is not None:
                raise CaptureError(_TRAINS_ANOTHER.format(fqn))
        trace.marks, marked = Marks.of(named, reductions)
        left, values = left_tensors.find(reads.place)
        elsewhere, put = reads.left(Known(tensor for _, tensor in named_state(model)))
        left |= put
        elsewhere.values.update(values)
        all_left.append(elsewhere)
        names = {id(each): fqn for fqn, each in named.items()}
        trace.hook_order = tuple(names[number] for number in order) if is_ordered else ()
        trace.unsharded, trace.memory = reductions.unsharded, reductions.memory
        trace.left = [GraphOutput(OutputKind.LEFT, fqn) for fqn in left]
        trace.left += [GraphOutput(OutputKind.MEMORY, fqn) for fqn in assigned]
        in_model = *left.values(), *assigned.values()
        each_gradient = [gradients.pop(parameter, None) for parameter in named.values()]
        return [
            loss,
            *each_gradient,
            *(each.detach() if torch.is_tensor(each) else each for each in (*in_model, *others)),
            *marked,
        ]

    found: list[dict[str, Any]] = []  # by each trace that ended

    def run() -> tuple[TracedFunction, list[str]]:
        result = trace_with_torch(step, model)(*given)
        found.append({**vars(trace), "guards": decisions.guards})
        return result, decisions.texts

    try:
        with (
            TRACING,
            refusals.torchs_errors_named(),
            strides_of_kernels(),
            strides_known(strides),
            elements_counted(),
            live_state_restored(model),
            each_size_its_own(),
        ):
            named = zip(paths, leaves, strict=True)
            given = [_distinct(leaf, varying.get(path, ())) for path, leaf in named]
            result = trace_until_settled(model, reads, all_left, run, recaptures=recaptures)
    finally:
        for record in reversed(records):
            record.undo()  # a tensor from outside that loss_fn writes is written while it is traced
        carried.put_back(before)
        reads.look_again(carried.places)
    if (draws := tuple(trace.draws or ())) != carried.draws:
        if carried.draws:
            raise CaptureError(
                f"loss_fn calls {[each.name for each in draws]} where it is traced again, and called "
                f"{[each.name for each in carried.draws]} before; draw these numbers before the step"
            )
        raise DrawnError(*draws)
    vars(trace).update(found[0 if all_left[0].is_first else -1], result=result, calls=records[0].calls)
    # The later trace goes on where the first ended.
    trace.left_values = replace(all_left[0], values=all_left[0].values | all_left[-1].values)
    return trace


def _note(order: list[int], number: int, gradient: torch.Tensor) -> None:
    order.append(number)


def _outside_leaves(loss: torch.Tensor, parameters: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the leaves of a loss that are none of the parameters: tensors from outside."""
    known = {id(each) for each in parameters}
    found = (getattr(each, "variable", None) for each in functions_behind([loss.grad_fn]))
    leaves = {id(leaf): leaf for leaf in found if leaf is not None and id(leaf) not in known and not is_fake(leaf)}
    return [*leaves.values()]


@contextmanager
def _gradients_put_back(leaves: Collection[torch.Tensor]) -> Iterator[None]:
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # else backward adds to it
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


_CALLED_BACKWARD = (
    "loss_fn called backward itself; return the loss and let the capture differentiate it (a loss that runs "
    "backward chunk by chunk cannot be captured: sum the chunks' losses)"
)
_READ_SHARD = (  # to which eager FSDP2 adds the gradient that it reduces
    "loss_fn reads the shard of {!r} outside its fully_sharded module, as a penalty on a block's weights does, and a "
    "captured step would lose that gradient. Use the optimizer's weight_decay, or compute the penalty in the "
    "module's forward"
)
_INNER_BACKWARD = (  # as those of reversible networks
    "a backward of loss_fn calls backward itself, which fills the gradient of {!r}, and a captured step takes those "
    "that autograd returns. Call torch.autograd.grad there, give the function the parameters, too, and return their "
    "gradients"
)


_TRAINS_ANOTHER = (  # which eager would leave a gradient, and no optimizer has
    "forward puts another tensor in the place of {!r} and trains that, which no optimizer holds. Compute with what "
    "was there, and write the new values into it, with copy_(...) under torch.no_grad()"
)


def _check_loss(loss: Any, result: Any, trainable: list[str]) -> None:
    """Raises unless the loss of a result is a floating-point number that depends on a parameter of ``trainable``."""
    if not trainable:
        raise CaptureError("the model has no trainable parameter: nothing to differentiate")
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss_fn returned a {type(result).__name__}; return the loss, a scalar floating-point tensor, a tuple "
            "that begins with it, or a dict or an object that has it as its 'loss'"
        )
    if isinstance(loss, DTensor):
        raise CaptureError("loss_fn returned a DTensor; return this rank's loss, e.g. loss.to_local()")
    if loss.numel() != 1 or not loss.is_floating_point():  # as `loss.backward()` has it, of any shape
        raise CaptureError(
            f"loss_fn must return a scalar floating-point tensor, it returned shape {list(loss.shape)}, "
            f"{loss.dtype}; reduce it, e.g. with .mean()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trainable parameter (under no_grad, detached, or by torch.cond?)"
            f"; trainable: {', '.join(trainable[:3])}{', …' if len(trainable) > 3 else ''}"
        )


@contextmanager
def _autocast_cached(model: nn.Module, *, keeps_casts: bool) -> Iterator[None]:
    """Lets autocast keep its casts of weights, if it does in eager, and refuses it where a trace would not follow."""
    devices = {parameter.device.type for parameter in nn.Module.parameters(model) if parameter.requires_grad}
    why = ""
    if any(map(torch.is_autocast_enabled, devices)):
        why = "autocast is on around the step, and keeps a weight's cast from call to call. Enter it in loss_fn"
    elif any(map(is_tensor_subclass, nn.Module.parameters(model))):
        why = (
            "loss_fn runs a sharded model under autocast, which casts a weight once for all its uses and adds their "
            "gradients in the low precision; a captured step cannot follow. Use FSDP2's MixedPrecisionPolicy, "
            "simple_fsdp(param_dtype=...)"
        )

    def check(module: nn.Module, *_: object) -> None:
        # What autocast keeps: casts of float32 leaves. FSDP2's policy may have made others of them already; it has
        # not freed them yet.
        cast = [each for each in nn.Module.parameters(module, recurse=False) if each.dtype == torch.float32]
        devices = {parameter.device.type for parameter in cast if parameter.requires_grad}
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, devices)):
            raise CaptureError(f"{why}, or torch.autocast(..., cache_enabled=False) in both runs")

    # The tracer turns the cache off.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(keeps_casts)
    try:
        with register_module_forward_hook(check) if why else nullcontext():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _distinct(leaf: Any, varying: Collection[int]) -> Any:
    """Returns a tensor of its own for each leaf: the tracer takes a tensor that is given twice for one input."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach()
    if varying:
        mark_dims(tensor, varying)
    return tensor
