"""Operators that change a tensor's shape in place are views in a captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline
from graphpasses.proof.prove import prove


class Reshaped(nn.Module):
    """Gives tensors other shapes in place; ``F.linear`` of a vector does so by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)
        self.seen = nn.Buffer(torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x[0])
        z = x * 2
        z.t_().unsqueeze_(0)
        z.transpose_(1, 2)
        return y.sum() + z.squeeze_().square() + z[:, :1] * y[0]


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def changes_shapes(node: fx.Node) -> bool:
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def test_shapes_changed_in_place_are_views() -> None:
    step = capture_train_step(loss_fn, Reshaped(), batch(0))
    assert not any(map(changes_shapes, step.graph.nodes))
    processed = Pipeline((DeduplicateShared(),)).run(step, prove=True)
    for each in (step, processed):
        each.check(batch(1))
    certificate = prove(step, processed)
    assert not certificate.unproved
    assert "the gradient of 'linear.weight'" in certificate.proved


@pytest.mark.parametrize(
    ("reshape", "what"),
    [
        (lambda model, y, outside: y.unsqueeze_(1), r"'batch\[1\]' another shape .*\[5\], .* then \(\[5, 1\]"),
        (lambda model, y, outside: model.seen.t_(), "'seen' another shape in place"),
        (lambda model, y, outside: outside.t_(), "from outside another shape in place at .*test_shapes_in_place"),
    ],
    ids=["batch", "buffer", "outside"],
)
def test_the_shape_of_what_stays_is_changed_in_place(reshape: Any, what: str) -> None:
    model, y, outside = Reshaped(), torch.ones(5), torch.ones(2, 3)
    before = [[*each.shape] for each in (model.seen, y, outside)]

    def changing(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * reshape(model, y, outside).mean()

    with pytest.raises(CaptureError, match=what):
        capture_train_step(changing, model, batch(0), y, check=False)
    assert [[*each.shape] for each in (model.seen, y, outside)] == before


class Observed(nn.Module):
    """A kernel of torch, whose fake one does not, resizes its buffers at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.quantized = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver, -128, 127, qscheme=torch.per_channel_symmetric, dtype=torch.qint8
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.quantized(self.linear.weight))


def test_a_kernel_that_resizes_a_buffer_is_refused_and_undone() -> None:
    model = Observed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"'quantized.scale' another shape .* run loss_fn once before the capture"):
        capture_train_step(loss_fn, model, batch(0))
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    loss_fn(model, batch(0))
    assert model.quantized.scale.shape != before["quantized.scale"].shape  # what was undone
    capture_train_step(loss_fn, model, batch(0)).check(batch(1))
