"""Trace what an optimizer does with gradients, by running its own code on other tensors; and check that trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor, local_part
from graphpasses._torch.fake_mode import new_fake_mode
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses._torch.module_answers import answers_as_in_eager
from graphpasses._torch.optimizers import lists_take_fakes, shadow_of
from graphpasses._torch.step_tracer import trace_with_torch
from graphpasses._torch.storage import freed_memory_returned
from graphpasses._torch.symbols import UNDECIDED
from graphpasses.capture.traced_result import inner_attrs
from graphpasses.capture.update_numbers import TracedNumbers
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import CapturedStep, GraphInput, InputKind, OutputKind, get_state
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.several_models import clipped_parameters
from graphpasses.graph.update import Update, carried_values, clip_gradients
from graphpasses.identity import same_bits
from graphpasses.state.optimizers import Number, OptimizerFacts, Optimizers, numbers_of, with_numbers

_Tensors = dict[str, torch.Tensor]
State: TypeAlias = dict[str, dict[str, Any]]
"""What an optimizer keeps: by FQN of a parameter, and by name."""


@dataclass(frozen=True)
class UpdateSource:
    """What is traced."""

    optimizers: Optimizers
    groups: Sequence[Sequence[str]]  # by group, the FQNs of the parameters that it updates
    parameters: Mapping[str, torch.Tensor]  # by FQN, those that have gradients, in the order of the model
    clip_norm: float | None  # the norm to which all gradients together are clipped; None if they are not

    def step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        state: State,
        numbers: Mapping[Number, Any],
    ) -> State:
        """Runs torch's own code on other tensors; returns the optimizer's state after it.

        Parameters and gradients are by FQN; the gradients of the parameters become these. ``numbers`` take the places
        of the optimizer's.
        """
        self.clip(parameters, gradients)
        shadows = {optimizer: shadow_of(optimizer) for optimizer in self.optimizers.each}
        for index, ((optimizer, group), fqns) in enumerate(zip(self.optimizers.groups, self.groups, strict=True)):
            shadow, of_group = shadows[optimizer], {n: v for (i, n), v in numbers.items() if i == index}
            given = with_numbers(group, of_group) | {"params": [parameters[fqn] for fqn in fqns]}
            shadow.param_groups.append(given)
            shadow.state.update({parameters[fqn]: dict(state[fqn]) for fqn in fqns if fqn in state})
        both = Optimizers(tuple(shadows.values()))
        both.step()
        return {fqn: dict(both.state_of(parameters[fqn])) for group in self.groups for fqn in group}

    def clip(
        self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Gives parameters their gradients, both by FQN, and clips these in place; returns the norm that they had."""
        for fqn, gradient in gradients.items():
            parameters[fqn].grad = gradient
        return None if self.clip_norm is None else clip_gradients(parameters.values(), self.clip_norm)

    def parts(self) -> list[UpdateSource]:
        """Returns sources without clipping, one for each parameter: a step does nothing with several at once.

        Where parameters are of several kinds, there is one source for all: an optimizer that may choose makes lists
        of all or of none.
        """
        kinds = {(type(each), each.device) for each in self.parameters.values()}
        each = [[fqn] for fqn in self.parameters] if len(kinds) == 1 else [[*self.parameters]]
        return [replace(self.without(self.parameters.keys() - fqns), clip_norm=None) for fqns in each]

    def without(self, fqns: Collection[str]) -> UpdateSource:
        """Returns a source of the parameters that ``fqns`` does not name."""
        return replace(
            self,
            groups=[[fqn for fqn in group if fqn not in fqns] for group in self.groups],
            parameters={fqn: each for fqn, each in self.parameters.items() if fqn not in fqns},
        )

    def live_state(self) -> State:
        """Returns the state that the optimizer has now, of each parameter that it updates."""
        fqns = (fqn for group in self.groups for fqn in group)
        return {fqn: dict(self.optimizers.state_of(self.parameters[fqn])) for fqn in fqns}

    def state(self) -> State:
        """Returns the state of each parameter: the live one or, where it is not there yet, one like it will be."""
        live = self.live_state()
        made = self.without([fqn for fqn, values in live.items() if values]).made_state()
        return {fqn: values or made[fqn] for fqn, values in live.items()}

    def made_state(self) -> State:
        """Returns state like the first step makes, which is taken on fake tensors."""
        if not self.parameters:
            return {}
        mode = new_fake_mode()

        def fake(value: Any) -> Any:
            return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

        parameters = {fqn: fake(parameter.detach()) for fqn, parameter in self.parameters.items()}
        with mode:
            gradients = {fqn: torch.empty_like(parameter) for fqn, parameter in parameters.items()}
            numbers = {number: fake(value) for number, value in numbers_of(self.optimizers).items()}
            made = self.step(parameters, gradients, {}, numbers)
        return {fqn: {name: _like(value) for name, value in values.items()} for fqn, values in made.items()}


def _like(value: Any) -> Any:
    """Returns a real tensor like a fake one; nothing is written into it."""
    if isinstance(value, DTensor):
        return as_dtensor(_like(value.to_local()), value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


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
    try:
        with answers_as_in_eager(), lists_take_fakes():
            _check_shapes(source)
            state = source.state()
            numbers = TracedNumbers(optimizers)
            module, inputs = _trace(source, state, numbers)
    except CaptureError:
        raise
    except UNDECIDED as error:
        raise CaptureError(
            f"{optimizers.name} decides by a value that it keeps, as a count of steps, and a captured update does "
            "the same at each call; capture without optimizer=, and call optimizer.step() after the step"
        ) from error
    except Exception as error:
        raise CaptureError(
            f"the step of {optimizers.name} fails while it is traced: {type(error).__name__}: {error}"
        ) from error
    names = {get_state(step.model, fqn): fqn for fqn in step.parameters}
    facts = OptimizerFacts.of(optimizers, names, state, numbers.decisions)

    def without(fqns: Collection[str]) -> Update:
        return trace_update(step, source.without(fqns))

    return Update(module, inputs, facts, source.clip_norm, step.model, without)


def _check_shapes(source: UpdateSource) -> None:
    for fqn, values in source.live_state().items():
        shape = source.parameters[fqn].shape
        expected = shape, (*shape[:1], 1)  # row-wise optimizers keep a value for each row
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape not in expected:
                raise CaptureError(
                    f"state {name!r} of {fqn!r} in the optimizer has shape {list(value.shape)}, the parameter "
                    f"{list(shape)}: it is the state of another model. Load that of this one"
                )


def _trace(
    source: UpdateSource, state: State, numbers: TracedNumbers
) -> tuple[fx.GraphModule, tuple[GraphInput, ...]]:
    parameters = {fqn: parameter.detach() for fqn, parameter in source.parameters.items()}
    names = ((fqn, name) for fqn, values in state.items() for name in values)
    tensors = [(fqn, name) for fqn, name in names if isinstance(state[fqn][name], torch.Tensor)]

    def update(*flat: Any) -> list[Any]:
        left = iter(flat)
        of_parameters, of_gradients = ({fqn: next(left) for fqn in parameters} for _ in range(2))
        of_state = {fqn: dict(values) for fqn, values in state.items()}
        for fqn, name in tensors:
            of_state[fqn][name] = next(left)
        with numbers.traced(left) as of_numbers:
            norm = source.clip(of_parameters, of_gradients)
            replace(source, clip_norm=None).step(of_parameters, {}, of_state, of_numbers)
        return [] if norm is None else [norm]

    traced = trace_with_torch(update)(
        *parameters.values(),
        *map(_like, parameters.values()),  # memory of their own
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
    return lazy_module(traced.gm, graph), _drop_unread(graph, inputs)


def _drop_unread(graph: fx.Graph, inputs: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
    kept = []
    for item, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            kept.append(item)
        else:
            graph.erase_node(node)
    return tuple(kept)


@freed_memory_returned()
def check_update(update: Update, source: UpdateSource) -> None:
    """Compares the bits of a traced update with those of the optimizer's own step; neither changes anything.

    Both run on copies of parameters and state, at half of each number among the optimizer's hyperparameters: what the
    trace took for a constant shows. Gradients are random numbers. The traced update runs whole, the optimizer's own
    step then for one parameter after the other, so that copies of all are held once. State that is not there is made
    by another step of the optimizer before.
    """
    consensus = RankConsensus.of_model(update.model)
    another = FidelityError("on another rank, the captured update and eager's part; its message says where")
    numbers = _other_numbers(update)
    parts = source.parts()
    parameters: _Tensors = {}
    state: State = {}
    with consensus.raised_together(another):
        for part in parts:
            copies, of_part = _copies_before(part, source)
            parameters.update(copies)
            state.update(of_part)
    with consensus.raised_together(another), torch.no_grad():
        # Not by a name, which would keep the gradients.
        update.module(*carried_values(update.inputs, parameters, _random(source, source.parameters), state, numbers))
    with consensus.raised_together(another), torch.no_grad():
        clipped = None if source.clip_norm is None else _random(source, source.parameters)
        if clipped is not None:
            source.clip({fqn: gradient.detach() for fqn, gradient in clipped.items()}, clipped)
    with consensus.raised_together(another), torch.no_grad():
        for part in parts:
            copies, before = _copies_before(part, source)
            gradients = _random(source, copies) if clipped is None else {fqn: clipped[fqn] for fqn in copies}
            expected = _own_step(part, copies, gradients, before, numbers)
            _compare({fqn: parameters.pop(fqn) for fqn in copies}, copies, "parameter")
            for fqn, values in expected.items():
                _compare(state.pop(fqn), values, f"optimizer state of {fqn!r}:")


def _other_numbers(update: Update) -> dict[Number, Any]:
    """Returns half of each number, where the optimizer does with it what it does with the number."""
    numbers = numbers_of(update.optimizers)
    other = {number: value * 0.5 for number, value in numbers.items()}
    for decision in update.facts.decisions:
        if not decision.holds(other):
            other |= {number: numbers[number] for number in decision.numbers}
    return other


def _copies_before(part: UpdateSource, whole: UpdateSource) -> tuple[_Tensors, State]:
    """Returns the same at each call: copies of a part's parameters, and of their state."""
    state = {fqn: _copies(values) for fqn, values in part.live_state().items()}
    if not all(state.values()):
        numbers = numbers_of(part.optimizers)
        state = _own_step(part, _copies(part.parameters), _random(whole, part.parameters), state, numbers)
    return _copies(part.parameters), state


def _own_step(
    part: UpdateSource, parameters: _Tensors, gradients: _Tensors, state: State, numbers: Mapping[Number, Any]
) -> State:
    try:
        return part.step(parameters, gradients, state, numbers)
    except Exception as error:
        raise CaptureError(f"the optimizer's own step fails: {type(error).__name__}: {error}") from error
    finally:
        for parameter in parameters.values():
            parameter.grad = None


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }


def _random(source: UpdateSource, fqns: Iterable[str]) -> _Tensors:
    """Returns gradients for parameters of a source: the same for each at each call."""
    places = {fqn: index for index, fqn in enumerate(source.parameters)}
    gradients: _Tensors = {}
    for fqn in fqns:
        gradients[fqn] = _like(source.parameters[fqn].detach())
        local = local_part(gradients[fqn])
        generator = torch.Generator().manual_seed(places[fqn])
        local.copy_(torch.randn(local.shape, generator=generator, device="cpu"))
    return gradients


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    for name, value in theirs.items():
        mine = ours.get(name)
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
            if same_bits(local_part(mine), local_part(value)):
                continue
        elif repr(mine) == repr(value):
            continue
        raise FidelityError(
            f"the captured update computes another {what} {name!r} than the optimizer's own step on the same "
            "gradients; capture without optimizer=, and call optimizer.step() after the step"
        )
