"""Trace what an optimizer does with the gradients of a captured step, by running its own code on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses._torch.optimizers import lists_take_fakes
from graphpasses.capture.eager_paths import eager_paths
from graphpasses.capture.traced_result import inner_attrs
from graphpasses.capture.tracer import find_tracer
from graphpasses.capture.update_source import State, UpdateSource, like
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep, GraphInput, InputKind, get_state
from graphpasses.graph.update import Update
from graphpasses.state.optimizer import OptimizerFacts, check_optimizer

__all__ = ["find_update", "trace_update"]


def find_update(
    step: CapturedStep, optimizer: Optimizer | None, clip_norm: float | None
) -> UpdateSource | None:
    """Returns what is to be traced of the optimizer's step after ``step``; None if there is no optimizer.

    Raises:
        CaptureError: see :func:`capture_train_step`.
    """
    if clip_norm is not None and not (type(clip_norm) in (int, float) and clip_norm > 0):
        raise CaptureError(f"clip_norm is {clip_norm!r}; give a number greater than zero, or None")
    if optimizer is None:
        if clip_norm is not None:
            raise CaptureError(
                "clip_norm clips gradients for an optimizer's step; give optimizer=, too, or clip after the step"
            )
        return None
    check_optimizer(optimizer)
    names = {get_state(step.model, fqn): fqn for fqn, *_ in step.identity.parameters}
    groups = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    trained = [fqn for fqn in names.values() if fqn not in step.without_gradient]
    updated = [[fqn for fqn in group if fqn in trained] for group in groups]
    if not any(updated):
        raise CaptureError(
            "the optimizer holds no parameter of the model that gets a gradient; make it of model.parameters(), "
            "after the model was sharded"
        )
    held = {fqn for group in updated for fqn in group}
    given = [fqn for fqn in trained if clip_norm is not None or fqn in held]
    return UpdateSource(optimizer, updated, {fqn: get_state(step.model, fqn) for fqn in given}, clip_norm)


def trace_update(step: CapturedStep, source: UpdateSource) -> Update:
    """Traces clipping and an optimizer's own step; nothing of the optimizer changes.

    State that the optimizer has not made yet is traced as it will be, made on fake tensors.

    Raises:
        CaptureError: see :func:`capture_train_step`.
    """
    optimizer = source.optimizer
    try:
        with eager_paths(), lists_take_fakes():
            _check_shapes(source)
            state = source.state()
            module, inputs = _trace(source, state)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the step of {type(optimizer).__name__} fails while it is traced: {type(error).__name__}: {error}"
        ) from error
    names = {get_state(step.model, fqn): fqn for fqn, *_ in step.identity.parameters}
    facts = OptimizerFacts.of(optimizer, names, state)
    return Update(
        module,
        inputs,
        facts,
        source.clip_norm,
        step.model,
        lambda fqns: trace_update(step, source.without(fqns)),
    )


def _check_shapes(source: UpdateSource) -> None:
    by_row = type(source.optimizer).__name__ == "RowWiseAdagrad"
    for fqn, values in source.live_state().items():
        shape = source.parameters[fqn].shape
        expected = (shape[0], 1) if by_row else shape
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != expected:
                raise CaptureError(
                    f"state {name!r} of {fqn!r} in the optimizer has shape {list(value.shape)}, the parameter "
                    f"{list(shape)}: it is the state of another model. Load that of this one"
                )


def _trace(source: UpdateSource, state: State) -> tuple[fx.GraphModule, tuple[GraphInput, ...]]:
    parameters = {fqn: parameter.detach() for fqn, parameter in source.parameters.items()}
    tensors = [
        (fqn, name)
        for fqn, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    rates = [_stand_in(index, group) for index, group in enumerate(source.optimizer.param_groups)]

    def update(*flat: Any) -> list[Any]:
        left = iter(flat)
        of_parameters, of_gradients = ({fqn: next(left) for fqn in parameters} for _ in range(2))
        of_state = {fqn: dict(values) for fqn, values in state.items()}
        for fqn, name in tensors:
            of_state[fqn][name] = next(left)
        given = [next(left) if isinstance(rate, torch.Tensor) else rate for rate in rates]
        of_rates = [
            rate.item()
            if isinstance(rate, torch.Tensor) and not isinstance(group["lr"], torch.Tensor)
            else rate
            for rate, group in zip(given, source.optimizer.param_groups, strict=True)
        ]
        source.step(of_parameters, of_gradients, of_state, of_rates)
        return []

    traced = find_tracer()(update, None)(
        *parameters.values(),
        *map(like, parameters.values()),  # memory of their own
        *(state[fqn][name].detach() for fqn, name in tensors),
        *(rate.detach() for rate in rates if isinstance(rate, torch.Tensor)),
    )
    items = [
        *(GraphInput(InputKind.PARAMETER, fqn) for fqn in parameters),
        *(GraphInput(InputKind.GRADIENT, fqn) for fqn in parameters),
        *(GraphInput(InputKind.OPTIMIZER_STATE, fqn, state=name) for fqn, name in tensors),
        *(
            GraphInput(InputKind.LEARNING_RATE, f"group {index}")
            for index, rate in enumerate(rates)
            if isinstance(rate, torch.Tensor)
        ),
    ]
    layouts = traced.input_subclass_layouts
    inputs = [
        replace(item, attr=attr)
        for index, item in enumerate(items)
        for attr in inner_attrs(layouts.get(index), item.name)
    ]
    graph = copy_graph(traced.gm.graph)
    _read_rates(graph, source.optimizer, inputs)
    for node in [each for each in graph.nodes if getattr(each.target, "namespace", "") == "profiler"][::-1]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return lazy_module(traced.gm, graph), _drop_unread(graph, inputs)


# ---- learning rates: the graph reads them as numbers --------------------------------------------------------------


def _stand_in(index: int, group: Mapping[str, Any]) -> Any:
    """Returns what takes the place of a group's learning rate while its step is traced.

    A fused kernel takes a number, which the trace keeps as it is: it is a number by which it is found again. Other
    steps compute with it in Python: there it is a number that a tensor holds, which is traced.
    """
    if isinstance(group["lr"], torch.Tensor):
        return group["lr"]
    if group.get("fused"):
        return math.ldexp(1.0, -900 - index)
    return torch.tensor(0.0, dtype=torch.float64)


def _read_rates(graph: fx.Graph, optimizer: Optimizer, inputs: list[GraphInput]) -> None:
    """Makes each learning rate that is a number an input of the graph."""
    nodes = {
        item.fqn: node
        for item, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True)
        if item.kind is InputKind.LEARNING_RATE
    }
    for index, group in enumerate(optimizer.param_groups):
        name = f"group {index}"
        if isinstance(group["lr"], torch.Tensor):
            continue
        if name in nodes:
            for item in [*nodes[name].users]:
                nodes[name].meta["val"] = item.meta["val"]
                item.replace_all_uses_with(nodes[name])
                graph.erase_node(item)
            continue
        mark = _stand_in(index, group)
        calls = [node for node in graph.nodes if node.kwargs.get("lr") == mark]
        if not calls:
            continue
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            rate = graph.placeholder(f"lr_{index}")
        rate.meta["val"] = mark
        inputs.append(GraphInput(InputKind.LEARNING_RATE, name))
        for node in calls:
            node.kwargs = {**node.kwargs, "lr": rate}


def _drop_unread(graph: fx.Graph, inputs: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
    kept = []
    for item, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            kept.append(item)
        else:
            graph.erase_node(node)
    return tuple(kept)
