"""Compare a traced update with the optimizer's own step, on copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.storage import freed_memory_returned
from graphpasses.capture.update_source import UpdateSource, like
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.update import Update, carried_values
from graphpasses.identity import same_bits
from graphpasses.state.arithmetic import Number
from graphpasses.state.optimizer_checks import INSTEAD
from graphpasses.state.optimizers import Kept

_Tensors = dict[str, torch.Tensor]
State: TypeAlias = dict[str, dict[str, Any]]
"""What an optimizer keeps: by FQN of a parameter, and by name."""


@freed_memory_returned()
def check_update(update: Update, source: UpdateSource) -> None:
    """Compares the bits of a traced update with those of the optimizer's own step; neither changes anything.

    Both run on copies of parameters and state, at half of each number among the optimizer's hyperparameters, and at
    two counts where it counts: what the trace took for a constant shows. Gradients are random numbers. The traced
    update runs whole, the optimizer's own step then for one parameter after the other, so that copies of all are held
    once; if that differs, as where a step computes of several, for all at once. State that is not there is made by
    another step of the optimizer before.
    """
    consensus = RankConsensus.of_model(update.model)
    kept = source.kept()
    # The names count; tensors would be held beside the copies.
    kept = Kept({fqn: dict.fromkeys(values) for fqn, values in kept.state.items()}, kept.groups)
    for numbers in _other_numbers(update):
        for parts in (source.parts(), [replace(source, clip_norm=None)]):
            found = _difference(update, source, kept, parts, numbers, consensus)
            if consensus.all_ranks([found is None])[0]:
                break
        else:
            raise FidelityError(
                found or "on another rank, the captured update and eager's part; its message says where"
            )


def _difference(
    update: Update,
    source: UpdateSource,
    kept: Kept,
    parts: Sequence[UpdateSource],
    numbers: Mapping[Number, Any],
    consensus: RankConsensus,
) -> str | None:
    another = FidelityError("on another rank, the captured update and eager's part; its message says where")
    parameters: _Tensors = {}
    state: State = {}
    with consensus.raised_together(another):
        for part in parts:
            copies, of_part = _copies_before(part, source, kept)
            parameters.update(copies)
            state.update(of_part)
    with consensus.raised_together(another), torch.no_grad():
        # Not by a name, which would keep the gradients.
        gradients = _random(source, source.parameters)
        update.replace_state(
            update.module(*carried_values(update.inputs, parameters, gradients, state, numbers)), state
        )
        del gradients
        left = update.facts.arithmetic.leaves(numbers)
    with consensus.raised_together(another), torch.no_grad():
        clipped = None if source.clip_norm is None else _random(source, source.parameters)
        if clipped is not None:
            source.clip({fqn: gradient.detach() for fqn, gradient in clipped.items()}, clipped)
    found: list[str] = []
    with consensus.raised_together(another), torch.no_grad():
        for part in parts:
            copies, before = _copies_before(part, source, kept)
            gradients = _random(source, copies) if clipped is None else {fqn: clipped[fqn] for fqn in copies}
            expected, changed = _own_step(part, copies, gradients, Kept(before, kept.groups), numbers)
            found += _differences({fqn: parameters.pop(fqn) for fqn in copies}, copies, "parameter")
            for fqn, values in expected.state.items():
                of_state = {name: value for (owner, name), value in {**numbers, **left}.items() if owner == fqn}
                found += _differences(state.pop(fqn) | of_state, values, f"optimizer state of {fqn!r}:")
            theirs = {number: value for number, value in changed.items() if not isinstance(value, torch.Tensor)}
            found += _differences(left, theirs, "number")
    return next(iter(found), None)


def _other_numbers(update: Update) -> list[Mapping[Number, Any]]:
    """Returns other numbers, by which the optimizer does the same: half of each, and where it counts other counts."""
    of_now, counted = update.facts.numbers, update.facts.arithmetic.left
    half = _with_counts(update, 0)
    others = (_with_counts(update, delta) for delta in range(1, 13) if counted)
    other = next((each for each in others if any(each[number] != of_now[number] for number in counted)), None)
    # A whole number may be compared, or be a kind; half of it takes all another way.
    is_other = any(type(value) is int and half[number] != value for number, value in of_now.items())
    return [*([of_now] if is_other else []), half, *([] if other is None else [other])]


def _with_counts(update: Update, delta: int) -> dict[Number, Any]:
    arithmetic, numbers = update.facts.arithmetic, update.facts.numbers
    other = {
        number: value + delta if type(value) is int and number in arithmetic.left else value * 0.5
        for number, value in numbers.items()
    }
    if not delta:
        other |= {number: numbers[number] for number in arithmetic.left}
    while other:
        try:
            call = arithmetic.first_changed(other)
        except (ArithmeticError, ValueError):  # which half of the numbers brings
            return dict(numbers)
        if call is None:
            break
        reset = {number: numbers[number] for number in call.numbers}
        if all(repr(other[number]) == repr(value) for number, value in reset.items()):
            return dict(numbers)
        other |= reset
    return other


def _copies_before(part: UpdateSource, whole: UpdateSource, kept: Kept) -> tuple[_Tensors, State]:
    """Returns the same at each call: copies of a part's parameters, and of their state."""
    live = part.live()
    state = {fqn: _copies(values) for fqn, values in live.state.items()}
    if not all(state[fqn] or not kept.state[fqn] for fqn in state):
        numbers = live.numbers(part.optimizers)
        given = Kept(state, live.groups)
        gradients = _random(whole, part.parameters)
        made, _ = _own_step(part, _copies(part.parameters), gradients, given, numbers, is_first=True)
        state = {fqn: dict(values) for fqn, values in made.state.items()}
    return _copies(part.parameters), state


def _own_step(
    part: UpdateSource,
    parameters: _Tensors,
    gradients: _Tensors,
    kept: Kept,
    numbers: Mapping[Number, Any],
    *,
    is_first: bool = False,
) -> tuple[Kept, dict[Number, Any]]:
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # by which it may begin
            return part.step(parameters, gradients, kept, numbers, is_first=is_first)
    except CaptureError:
        raise
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


def _differences(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], what: str) -> list[str]:
    found = []
    for name, value in theirs.items():
        mine = ours.get(name)
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
            if same_bits(local_part(mine), local_part(value)):
                continue
        elif repr(mine) == repr(value):
            continue
        found.append(
            f"the captured update computes another {what} {name!r} than the optimizer's own step on the same "
            f"gradients; {INSTEAD}"
        )
    return found
