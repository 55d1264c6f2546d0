"""Trace what an optimizer does with gradients, by running its own code on other tensors; and check that trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.dynamo import COMPILED_CALL, compiled_calls_raise
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses._torch.module_answers import answers_as_in_eager
from graphpasses._torch.optimizers import lists_take_fakes
from graphpasses._torch.step_tracer import trace_with_torch
from graphpasses._torch.symbols import UNDECIDED
from graphpasses.analysis.effects import is_written, operator_effects
from graphpasses.capture.slices import is_literal
from graphpasses.capture.traced_result import inner_attrs
from graphpasses.capture.update_numbers import TracedNumbers
from graphpasses.capture.update_source import NOT_FOLLOWED, UpdateSource, like
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep, GraphInput, InputKind, OutputKind, get_state
from graphpasses.graph.several_models import clipped_parameters
from graphpasses.graph.update import Update
from graphpasses.state.arithmetic import Number
from graphpasses.state.optimizer_checks import INSTEAD
from graphpasses.state.optimizers import Kept, OptimizerFacts, Optimizers
from graphpasses.state.reads import Reads


def find_update(step: CapturedStep, optimizers: Optimizers | None, clip_norm: float | None) -> UpdateSource | None:
    """Returns what is to be traced of the optimizer's step after ``step``; None if there is no optimizer."""
    if clip_norm is not None and not (type(clip_norm) in (int, float) and clip_norm > 0):
        raise CaptureError(f"clip_norm is {clip_norm!r}; give a number greater than zero, or None")
    if optimizers is None:
        if clip_norm is not None:
            raise CaptureError(
                "clip_norm clips gradients for an optimizer's step; give optimizer=, too, or clip after the step"
            )
        return None
    optimizers.check()
    if step.hook_order:
        raise CaptureError(
            "a hook waits behind the accumulation of a gradient, and a captured update takes gradients before that; "
            "capture without optimizer=, and call optimizer.step() after the step"
        )
    names = {get_state(step.model, fqn): fqn for fqn in step.parameters}
    groups = [[names.get(parameter) for parameter in group["params"]] for _, group in optimizers.groups]
    trained = [fqn for fqn in names.values() if fqn not in step.without_gradient]
    updated = [[fqn for fqn in group if fqn in trained] for group in groups]
    if not any(updated):
        raise CaptureError(
            "the optimizer holds no parameter of the model that gets a gradient; make it of model.parameters(), "
            "after the model was sharded"
        )
    held = {fqn for group in updated for fqn in group}
    for fqn in (item.fqn for item in step.outputs if item.kind in (OutputKind.LEFT, OutputKind.MEMORY)):
        if any(fqn in group for group in groups):
            raise CaptureError(
                f"loss_fn replaces {fqn!r}, or assigns to its .data, and a captured update would write what was "
                "there. Capture without optimizer=, and call optimizer.step() after the step; or write it in place"
            )
    if clip_norm is not None:
        held |= {names[each] for each in clipped_parameters(step.model, optimizers)}
    given = [fqn for fqn in trained if fqn in held]
    return UpdateSource(optimizers, updated, {fqn: get_state(step.model, fqn) for fqn in given}, clip_norm)


def trace_update(step: CapturedStep, source: UpdateSource) -> Update:
    """Traces clipping and the optimizers' own steps; nothing of the optimizers changes.

    State that the optimizer has not made yet is traced as it will be, made on fake tensors.
    """
    optimizers = source.optimizers
    reads = Reads(nn.Module(), type(optimizers.each[0]).step)
    try:
        with answers_as_in_eager(), lists_take_fakes():
            names = {get_state(step.model, fqn): fqn for fqn in step.parameters}
            with reads.watched():
                with reads.running():
                    _check_shapes(source)
                    _refuse_idle(source, names)
                    kept = source.kept()
                fused = [index for index, group in enumerate(kept.groups) if group.get("fused")]
                numbers = TracedNumbers(kept.numbers(optimizers), fused)
                module, inputs, left = _trace(source, kept, numbers, reads)
            if reads.drawn:
                raise CaptureError(f"{optimizers.name}.step() {reads.drawn}")
            replaced = tuple(
                (str(fqn), name) for (fqn, name), value in left.items() if isinstance(value, torch.Tensor)
            )
            arithmetic = numbers.arithmetic({each: value for each, value in left.items() if each not in replaced})
            _refuse_graph(module, inputs, source, decides=arithmetic.decides_by_counts)
    except CaptureError:
        raise
    except UNDECIDED as error:
        raise CaptureError(
            f"{optimizers.name} decides by the value of a tensor, which is known when the step runs, and a captured "
            f"update does the same at each call; {INSTEAD}"
        ) from error
    except Exception as error:
        if COMPILED_CALL in str(error):
            raise CaptureError(
                f"the step of {optimizers.name} calls a function that torch.compile made, and the bits of compiled "
                "kernels may be others. Let it call the function itself, put all under "
                f'torch.compiler.set_stance("force_eager"), or {INSTEAD}'
            ) from error
        raise CaptureError(
            f"the step of {optimizers.name} fails while it is traced: {type(error).__name__}: {error}"
        ) from error
    facts = OptimizerFacts.of(optimizers, names, kept, arithmetic, reads.names)
    if (call := arithmetic.always_other(facts.numbers)) is not None:
        counted = next(each for each in call.numbers if each in left)
        raise CaptureError(
            f"the step of {optimizers.name} gives a number that it counts, {counted[1]!r}, to what builds it in "
            f"({call.function.__name__}), and would be captured again at each call; {INSTEAD}"
        )

    def without(fqns: Collection[str]) -> Update:
        return trace_update(step, source.without(fqns))

    return Update(module, inputs, facts, source.clip_norm, step.model, without, replaced)


def _check_shapes(source: UpdateSource) -> None:
    """Raises if state that is there has other shapes than a first step makes."""
    live = source.live().state
    try:
        made = source.made().state if any(live.values()) else {}
    except KeyError:  # the optimizer has its state from when it was made, and no step makes it
        return
    for fqn, values in live.items():
        for name, value in values.items():
            other = made.get(fqn, {}).get(name)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape != other.shape:
                raise CaptureError(
                    f"state {name!r} of {fqn!r} in the optimizer has shape {list(value.shape)}, the parameter "
                    f"{list(source.parameters[fqn].shape)}: it is the state of another model. Load that of this one"
                )


def _refuse_idle(source: UpdateSource, names: Mapping[torch.Tensor, str]) -> None:
    """Raises if the optimizers do something with parameters that get no gradient."""
    idle = {
        names.get(each, f"parameter {place} of group {index}"): each
        for index, ((_, group), fqns) in enumerate(zip(source.optimizers.groups, source.groups, strict=True))
        for place, each in enumerate(group["params"])
        if names.get(each) not in fqns
    }
    if not idle:
        return
    by_id = {id(each): name for name, each in idle.items()}
    groups = [[by_id[id(p)] for p in group["params"] if id(p) in by_id] for _, group in source.optimizers.groups]
    others = replace(source, groups=groups, parameters=idle, clip_norm=None)
    changed: list[str] = []

    def run(*given: torch.Tensor) -> list[Any]:
        live = source.optimizers.kept({})
        parameters = dict(zip(idle, given, strict=True))
        kept, _ = others.step(parameters, {}, live, live.numbers(source.optimizers), is_first=True)
        changed.extend(fqn for fqn, each in parameters.items() if each.grad is not None or kept.state[fqn])
        return []

    traced = trace_with_torch(run)(*(each.detach() for each in idle.values()))
    layouts, nodes = traced.input_subclass_layouts, iter(traced.gm.graph.find_nodes(op="placeholder"))
    for index, fqn in enumerate(idle):
        if any(is_written(next(nodes)) for _ in inner_attrs(layouts.get(index), fqn)):
            changed.append(fqn)
    if changed:
        raise CaptureError(
            f"the step of {source.name} changes {changed[0]!r}, which gets no gradient, and a captured step "
            f"updates what gets one; give the optimizer no such parameters, or {INSTEAD}"
        )


def _refuse_graph(
    module: fx.GraphModule, inputs: Sequence[GraphInput], source: UpdateSource, *, decides: bool
) -> None:
    """Raises if a traced step does what is not followed, or does not write a parameter."""
    name = f"the step of {source.name}"
    for node in module.graph.nodes:
        if (
            node.op == "get_attr"
            and isinstance(getattr(module, str(node.target)), torch.Tensor)
            and not is_literal(node)
        ):
            raise CaptureError(f"{name} reads a tensor that is not in its state, {NOT_FOLLOWED}")
        if getattr(node.target, "namespace", "") == "c10d":
            raise CaptureError(f"{name} communicates ({node.target}), {NOT_FOLLOWED}")
        if operator_effects(node).has_hidden_state:
            raise CaptureError(
                f"{name} calls {node.target}, whose result depends on more than it is given, as random numbers do, "
                f"{NOT_FOLLOWED}"
            )
    placeholders = zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True)
    written_inputs = [item for item, node in placeholders if is_written(node)]
    for item in written_inputs:
        if item.kind is InputKind.HYPERPARAMETER:
            where = source.optimizers.group_name(item.group)
            raise CaptureError(f"{name} writes into the tensor {item.state!r} of {where}, {NOT_FOLLOWED}")
    if decides:  # and may write later
        return
    written = {item.fqn for item in written_inputs if item.kind is InputKind.PARAMETER}
    for fqn in (fqn for group in source.groups for fqn in group):
        if fqn not in written:
            raise CaptureError(
                f"{name} does not write {fqn!r} in place where it runs on other tensors, {NOT_FOLLOWED}"
            )


def _trace(
    source: UpdateSource, kept: Kept, numbers: TracedNumbers, reads: Reads
) -> tuple[fx.GraphModule, tuple[GraphInput, ...], dict[Number, Any]]:
    """Returns the graph, what its placeholders carry, and what the step leaves."""
    parameters = {fqn: parameter.detach() for fqn, parameter in source.parameters.items()}
    state = kept.state
    names = ((fqn, name) for fqn, values in state.items() for name in values)
    tensors = [(fqn, name) for fqn, name in names if isinstance(state[fqn][name], torch.Tensor)]
    left: dict[Number, Any] = {}

    def update(*flat: Any) -> list[Any]:
        values = iter(flat)
        of_parameters, of_gradients = ({fqn: next(values) for fqn in parameters} for _ in range(2))
        of_state = {fqn: dict(each) for fqn, each in state.items()}
        for fqn, name in tensors:
            of_state[fqn][name] = next(values)
        with numbers.traced(values) as of_numbers, compiled_calls_raise(), reads.running():
            norm = source.clip(of_parameters, of_gradients)
            given = Kept(of_state, kept.groups)
            left.update(replace(source, clip_norm=None).step(of_parameters, {}, given, of_numbers)[1])
        tensors_left = [local_part(each) for each in left.values() if isinstance(each, torch.Tensor)]
        return [*([] if norm is None else [norm]), *tensors_left]

    traced = trace_with_torch(update)(
        *parameters.values(),
        *map(like, parameters.values()),  # memory of their own
        *(state[fqn][name].detach() for fqn, name in tensors),
        *numbers.tensors,
    )
    items = [
        *(GraphInput(InputKind.PARAMETER, fqn) for fqn in parameters),
        *(GraphInput(InputKind.GRADIENT, fqn) for fqn in parameters),
        *(GraphInput(InputKind.OPTIMIZER_STATE, fqn, state=name) for fqn, name in tensors),
        *numbers.inputs,
    ]
    layouts = traced.input_subclass_layouts
    attrs = [inner_attrs(layouts.get(index), item.name) for index, item in enumerate(items)]
    inputs = [replace(item, attr=attr) for item, each in zip(items, attrs, strict=True) for attr in each]
    graph = copy_graph(traced.gm.graph)
    numbers.read(graph, inputs)
    for node in [each for each in graph.nodes if getattr(each.target, "namespace", "") == "profiler"][::-1]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    read = []
    for item, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            read.append(item)
        else:
            graph.erase_node(node)
    return lazy_module(traced.gm, graph), tuple(read), left
