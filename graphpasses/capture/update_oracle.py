"""Whether the traced update of a step computes what its optimizer's own step does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graphpasses.capture.update_source import State, UpdateSource, like
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import InputKind
from graphpasses.graph.update import Update
from graphpasses.graph.votes import Votes
from graphpasses.identity import same_bits

__all__ = ["check_update"]


def check_update(update: Update, source: UpdateSource) -> None:
    """Compares the bits of a traced update with those of the optimizer's own step; neither changes anything.

    Both run on copies of parameters and state, at half the learning rate: what the trace took for a constant shows.
    Gradients are random numbers. State that is not there is made by another step of the optimizer before.

    Args:
        update: what was traced.
        source: the optimizer's own step.

    Raises:
        FidelityError: they differ; or they do on another rank.
        CaptureError: the optimizer's own step fails.
    """
    votes = Votes.of_model(update.model)
    another = FidelityError("on another rank, the captured update and eager's part; its message says where")
    with votes.raised_together(another):
        gradients = _random(source.parameters)
        rates = [group["lr"] * 0.5 for group in source.optimizer.param_groups]
        parameters, state = _copies(source.parameters), _state(source)
    given = _copies(parameters), {fqn: _copies(values) for fqn, values in state.items()}
    with votes.raised_together(another), torch.no_grad():
        try:
            expected = source.step(parameters, _copies(gradients), state, rates)
        except Exception as error:
            raise CaptureError(f"the optimizer's own step fails: {type(error).__name__}: {error}") from error
        update.module(*_values(update, *given, _copies(gradients), rates))
    with votes.raised_together(another):
        _compare(given[0], parameters, "parameter")
        for fqn, values in expected.items():
            _compare(given[1][fqn], values, f"optimizer state of {fqn!r}:")


def _state(source: UpdateSource) -> State:
    live = source.live_state()
    if all(live.values()):
        return {fqn: _copies(values) for fqn, values in live.items()}
    given = {fqn: _copies(values) for fqn, values in live.items()}
    rates = [group["lr"] for group in source.optimizer.param_groups]
    return source.step(_copies(source.parameters), _random(source.parameters), given, rates)


def _values(
    update: Update,
    parameters: Mapping[str, torch.Tensor],
    state: State,
    gradients: Mapping[str, torch.Tensor],
    rates: list[Any],
) -> list[Any]:
    values: list[Any] = []
    for item in update.inputs:
        value: Any
        if item.kind is InputKind.LEARNING_RATE:
            value = rates[int(item.fqn.removeprefix("group "))]
        elif item.kind is InputKind.OPTIMIZER_STATE:
            value = state[item.fqn][item.state]
        else:
            value = (gradients if item.kind is InputKind.GRADIENT else parameters)[item.fqn]
        values.append(getattr(value, item.attr) if item.attr else value)
    return values


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _random(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gradients: dict[str, torch.Tensor] = {}
    for fqn, parameter in parameters.items():
        gradients[fqn] = like(parameter.detach())
        local = _local(gradients[fqn])
        local.copy_(torch.randn(local.shape, generator=generator))
    return gradients


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    for name, value in theirs.items():
        mine = ours.get(name)
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
            if same_bits(_local(mine), _local(value)):
                continue
        elif repr(mine) == repr(value):
            continue
        raise FidelityError(
            f"the captured update computes another {what} {name!r} than the optimizer's own step on the same "
            "gradients; capture without optimizer=, and call optimizer.step() after the step"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
