"""Operators that change a tensor's shape in place are views in a captured step."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline
from graphpasses.proof.prove import prove


class Reshaped(nn.Module):
    """Gives tensors other shapes in place; ``F.linear`` of a vector does so by itself."""

    def __init__(self, *, state: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)
        self.seen = nn.Buffer(torch.zeros(2, 4))
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x[0])
        z = x * 2
        z.t_().unsqueeze_(0)
        z.transpose_(1, 2)
        if self.state:
            self.seen.t_()
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


def test_the_shape_of_a_buffer_is_changed_in_place() -> None:
    step = capture_train_step(loss_fn, Reshaped(state=True), batch(0), check=False)
    assert torch.ops.aten.t_.default in {node.target for node in step.graph.nodes}
    with pytest.raises(CaptureError, match="'seen' was"):
        capture_train_step(loss_fn, Reshaped(state=True), batch(0))
