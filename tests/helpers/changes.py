"""Changes after a capture that a step sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


def refuses(model: nn.Module, loss_fn: Callable[..., torch.Tensor], change: Callable[[], object]) -> str:
    """Returns the message by which a step refuses what changes what eager computes, if it must not be captured again;
    else it then computes what eager does.
    """
    step = capture_train_step(loss_fn, model, X, check=False)
    before = loss_fn(model, X).detach()
    assert same_bits(step(X), before)
    change()
    assert not same_bits(after := loss_fn(model, X).detach(), before)
    with pytest.raises(CaptureError) as error:
        replace(step, recapture=None)(X)
    assert same_bits(step(X), after)
    return str(error.value)
