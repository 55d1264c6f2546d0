"""Steps of several microbatches, eager and captured, whose gradients FSDP2 keeps until the last."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from graphpasses import capture_train_step, default_pipeline
from tests.helpers.models import next_token_loss, parallelize, same_bits
from tests.helpers.step_cases import Batch, Case, differences, shard_eagerly

__all__ = ["Accumulation", "Micro", "train"]

Micro = tuple[str, str]
"""How much of a microbatch's gradients is reduced, ``"none"``, ``"shards"`` (HSDP) or ``"all"``, and who runs it.

That is ``"eager"``, ``"step"``, which obeys the model's settings, or ``"accumulate"``.
"""


@dataclass(frozen=True)
class Accumulation:
    """How a model is trained by both.

    Args:
        case: model and sharding.
        steps: the microbatches of each step.
        updates: whether the captured side's step updates, where its last microbatch is captured.
        clip_norm: None does not clip.
        reshards: whether eager frees unsharded parameters after each microbatch.
        check_every: how often the captured side, which is proved then, is compared with eager by itself; None does
            neither.
        loss_fn: of both.
    """

    case: Case
    steps: Sequence[Sequence[Micro]]
    updates: bool = False
    clip_norm: float | None = None
    reshards: bool = True
    check_every: int | None = None
    loss_fn: Callable[..., torch.Tensor] = next_token_loss


def settle(model: nn.Module, reduced: str, *, reshards: bool) -> None:
    """Sets what a user sets before a microbatch."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduced != "none")
    model.set_requires_all_reduce(reduced == "all")
    model.set_reshard_after_backward(reshards or reduced == "all")


def train(how: Accumulation, dropped: list[str] | None = None) -> list[str]:
    """Returns what differs from eager: losses, gradients, weights.

    Args:
        how: a model is trained.
        dropped: for a control, gets what differs in one more step, like the first one, of whose microbatches the
            captured side leaves out the first.
    """
    case = how.case
    torch.manual_seed(0)
    models: list[nn.Module] = [case.build()]
    models.append(copy.deepcopy(models[0]))
    if case.tensor_parallel:
        models = [parallelize(each, case.parallel_meshes[1]) for each in models]
    eager, model = (shard_eagerly(case, each) for each in models)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (eager, model)]
    options: dict[str, Any] = {}
    if how.updates:
        options = {"optimizer": optimizers[1], "clip_norm": how.clip_norm}
    options |= {"check": how.check_every is not None, "check_every": how.check_every}
    step = capture_train_step(how.loss_fn, model, *case.batch(0), **options)
    step = default_pipeline().run(step, prove=None if how.check_every is not None else False)
    found: list[str] = []
    seed = 0
    for index, micros in enumerate([*how.steps, *([] if dropped is None else how.steps[:1])]):
        is_control = index == len(how.steps)
        different = dropped if dropped is not None and is_control else found
        for place, (reduced, by) in enumerate(micros):
            batch = case.batch(seed := seed + 10)
            settle(eager, reduced, reshards=how.reshards)
            expected = run_eagerly(how, eager, batch)
            if is_control and place == 0:
                continue
            settle(model, "all" if by == "accumulate" else reduced, reshards=how.reshards)
            if by == "eager":
                loss = run_eagerly(how, model, batch)
            else:
                loss = step.accumulate(*batch) if by == "accumulate" else step(*batch)
            different += [] if same_bits(loss, expected) else [f"loss {index}.{place}"]
        is_updated = how.updates and micros[-1][1] == "step"
        if not is_updated:
            different += [f"gradient {fqn}" for fqn in differences(eager, model, lambda p: p.grad)]
        for each, optimizer in zip((eager, model)[: 1 if is_updated else 2], optimizers, strict=False):
            if how.clip_norm is not None:
                nn.utils.clip_grad_norm_(each.parameters(), how.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        different += [f"weight {fqn}" for fqn in differences(eager, model, lambda p: p)]
    return found


def run_eagerly(how: Accumulation, model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = how.loss_fn(model, *batch)
    loss.backward()
    return loss.detach()
