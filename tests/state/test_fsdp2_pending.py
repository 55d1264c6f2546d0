"""Gradients that FSDP2 keeps for its next reduction: a step of its own would lose them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from tests.helpers.models import LanguageModel, next_token_loss, token_batch


def captured(model: nn.Module) -> CapturedStep:
    return capture_train_step(next_token_loss, model, *token_batch())


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_gradients_that_wait_for_a_reduction(reduce_dtype: torch.dtype | None) -> None:
    with fake_process_group(4):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = fully_shard(LanguageModel(), mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        step = captured(model)
        model.set_requires_gradient_sync(False)
        next_token_loss(model, *token_batch()).backward()
        model.set_requires_gradient_sync(True)
        for call in (lambda: step(*token_batch()), lambda: captured(model)):
            with pytest.raises(CaptureError) as caught:
                call()
            assert str(caught.value) == (
                "FSDP2 group '(root)' holds gradients of an earlier backward that ran under "
                "set_requires_gradient_sync(False), and eager would reduce them with this step's; a captured step "
                "would leave them out. Run the last microbatch eagerly too, or call the captured step for all "
                "microbatches: it reduces each, and .grad gets the sum"
            )
        next_token_loss(model, *token_batch()).backward()
        step(*token_batch())  # near miss: all is reduced
        captured(model)


def test_gradients_that_wait_for_the_replicas() -> None:
    with fake_process_group(4):
        model = fully_shard(LanguageModel(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
        step = captured(model)
        model.set_requires_all_reduce(False)
        next_token_loss(model, *token_batch()).backward()
        model.set_requires_all_reduce(True)
        with pytest.raises(CaptureError, match=r"that ran under set_requires_all_reduce\(False\)"):
            step(*token_batch())
        next_token_loss(model, *token_batch()).backward()
        step(*token_batch())
