"""Which operators autograd calls for a view whose memory was written."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from graphpasses._torch.operator_calls import OperatorCalls
from graphpasses._torch.view_replay import views_replayed


def backward(x: torch.Tensor) -> list[str]:
    """Returns the operators of backward."""
    x = x.requires_grad_()
    with OperatorCalls(nn.Module(), {"x": x}) as record:
        y = x.mul(3).view(2, 2, 3).transpose(0, 1)
        y[0].mul_(2)
        y.sin().sum().backward()
    return [call.operator for call in record.calls if call.where.in_backward]


def test_views_are_made_again_as_for_fake_tensors() -> None:
    x = torch.ones(4, 3)
    with FakeTensorMode() as mode:
        traced = backward(mode.from_tensor(x))
    with views_replayed():
        replayed = backward(x.clone())
    assert replayed == traced
    assert backward(x.clone()) != traced  # the control
