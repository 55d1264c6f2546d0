"""Whether the traced update of a step computes what its optimizer's own step does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.storage import freed_memory_returned
from graphpasses.capture.update import State, UpdateSource, like
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.update import Update, carried_values
from graphpasses.identity import same_bits
from graphpasses.state.optimizers import Number, numbers_of

_Tensors = dict[str, torch.Tensor]


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
        gradients[fqn] = like(source.parameters[fqn].detach())
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
