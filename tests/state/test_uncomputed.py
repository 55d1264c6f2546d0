"""What eager's forward keeps in attributes for others to read, a captured step does not, and says so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import UnsupportedError
from graphpasses.identity import same_bits
from graphpasses.state.uncomputed import Uncomputed

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
REFUSED = r"forward keeps a tensor in the attribute '0\.scores', and a captured step does not"


class Attention(nn.Linear):
    """Keeps its scores to be looked at, and a loss of its own for the loss function, as routers of experts do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.scores: Tensor | None = None
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.scores = super().forward(x).softmax(1)
        self.losses = [self.scores.square().sum()]
        return self.scores * x


def loss_fn(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x).sum() + 0.1 * sum(model[0].losses)  # type: ignore[no-any-return, arg-type]


def test_attributes_that_forward_sets_before_it_reads_them() -> None:
    model, eager = nn.Sequential(Attention()), nn.Sequential(Attention())
    step = capture_train_step(loss_fn, model, X)
    assert any("'0.losses', '0.scores'" in note for note in step.notes)
    assert model[0].scores is None
    loss, expected = step(2 * X), loss_fn(eager, 2 * X)
    expected.backward()
    assert same_bits(loss, expected.detach())
    assert not same_bits(loss, eager(2 * X).sum().detach())  # the control: without the loss that was kept
    assert torch.equal(model[0].weight.grad, eager[0].weight.grad)
    with pytest.raises(UnsupportedError, match=REFUSED):
        model[0].scores.mean()
    model(X)  # an evaluation keeps its own, which no later step may leave
    assert model[0].scores.shape == X.shape
    step.check(X)
    step(X)
    with pytest.raises(UnsupportedError, match=REFUSED):
        model[0].scores + X


def test_a_model_with_what_is_not_computed_is_copied() -> None:
    value = Uncomputed("0.scores")
    for copied in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert repr(copied) == "<'0.scores' is not kept by a captured step>"
        for use in (torch.sum, float, bool, list, lambda each: X * each):
            with pytest.raises(UnsupportedError, match=REFUSED):
                use(copied)
