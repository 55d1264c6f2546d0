"""A step of an FSDP2 model is compared with eager between steps: bits, what is put back, and all ranks together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses.capture import capture_train_step
from graphpasses.errors import AgreementError, FidelityError
from graphpasses.graph import rank_consensus
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from tests.helpers.models import LanguageModel, make_mesh, next_token_loss, same_bits, token_batch


class Scale:
    def __init__(self) -> None:
        def values() -> Any:
            scale = 1.0
            while True:
                scale = (yield scale) or scale

        frame = values()
        next(frame)
        self.read = frame.send


def check() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for has_optimizer in (False, True):
        scale = Scale()
        torch.manual_seed(0)
        model = LanguageModel()
        for layer in model.layers:
            fully_shard(layer, mesh=make_mesh(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fully_shard(model, mesh=make_mesh(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        options: dict[str, Any] = {"optimizer": optimizer, "clip_norm": 0.1} if has_optimizer else {}

        def loss_fn(model: Any, *batch: torch.Tensor, scale: Scale = scale) -> torch.Tensor:
            return next_token_loss(model, *batch) * scale.read(None)

        def weights(model: Any = model) -> list[torch.Tensor]:
            return [parameter.to_local().detach().clone() for parameter in model.parameters()]

        captured = capture_train_step(loss_fn, model, *token_batch(), check_every=4, **options)
        step = default_pipeline().run(captured)
        for _ in range(3):
            before = weights()
            step.check(*token_batch())
            found[f"put back, {has_optimizer}"] = all(map(same_bits, before, weights()))
            step(*token_batch())
            if not has_optimizer:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 1:
            scale.read(2.0)
        try:
            step(*token_batch())  # the fourth call
        except FidelityError as error:
            found[f"after a change, {has_optimizer}"] = str(error)[:120]
    return found


@pytest.mark.multiprocess
def test_two_ranks() -> None:
    first, second = run_ranks(check, 2)
    for has_optimizer in (False, True):
        assert first[f"put back, {has_optimizer}"]
        assert second[f"put back, {has_optimizer}"]
        assert second[f"after a change, {has_optimizer}"].startswith(
            "the captured step computes another loss than eager"
        )
        assert "eager" in first[f"after a change, {has_optimizer}"]


def check_alone() -> list[str]:
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=make_mesh(2))
    step = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
    step.check(torch.ones(2, 4))
    said = []
    for _ in range(2):
        if dist.get_rank() == 0:
            short = mock.patch.object(rank_consensus, "_LONG_PATIENCE", timedelta(seconds=1))
            with short, pytest.raises(AgreementError) as error:
                step.check(torch.ones(2, 4))
            said.append(str(error.value))
        dist.barrier()
        step.check(torch.ones(2, 4))
        step(torch.ones(2, 4))
    return said


@pytest.mark.multiprocess
def test_one_rank_alone_is_refused_and_all_may_go_on() -> None:
    (first, again), others = run_ranks(check_alone, 2)
    assert first.startswith("step.check was called on rank 0, and not on all")
    assert again == first
    assert not others
