"""Layers of LSTMs in graphs: as oneDNN computes them where gradients are on, and where they are off, as there."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.identity import same_bits
from graphpasses.ops.rnn_layer import RNN_LAYER

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

SIZES = ((8, 4, 16), (64, 16), (64, 16), (64,), (64,), (4, 16), (4, 16))


def layer() -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(0)
    given = (torch.randn(size, generator=random, device="cpu") for size in SIZES)
    return *given, False, [], 2, 16, 1, True, False, False, True


def test_has_the_bits_of_eager_with_gradients() -> None:
    eagers, given = torch.ops.aten.mkldnn_rnn_layer.default, layer()
    expected = eagers(*given)
    with torch.no_grad():
        ours, without = RNN_LAYER(*given), eagers(*given)
    assert all(map(same_bits, ours[:3], expected[:3]))
    assert ours[3].shape == expected[3].shape
    assert without[3] is None
    assert not same_bits(without[0], expected[0])


def test_no_elements_are_refused() -> None:
    _, *others = layer()
    with pytest.raises(BatchMismatchError, match="an LSTM is given no elements, which oneDNN does not take"):
        RNN_LAYER(torch.zeros(0, 4, 16), *others)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm, self.teacher = nn.LSTM(6, 16, **options), nn.LSTM(6, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)[0]
        output, (hidden, cell) = self.lstm(x)
        return (output[..., :8] - target[..., :8]).square().mean() + (hidden.sum() + cell.sum()) / 100


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "dropout": 0.5, "bidirectional": True}, {"proj_size": 8}, {"dtype": torch.bfloat16}],
)
def test_a_step_has_the_bits_of_eager(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = Model(**options)
    ours.teacher.to(ours.lstm.weight_ih_l0.dtype)
    eager, losses = copy.deepcopy(ours), []
    random = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 3, 6, generator=random, device="cpu") for _ in range(3)]
    batches = [each.to(ours.lstm.weight_ih_l0.dtype) for each in batches]
    step = capture_train_step(lambda model, x: model(x), ours, batches[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    for index, batch in enumerate(batches):
        torch.manual_seed(index)
        losses.append(step(batch))
        torch.manual_seed(index)
        loss = eager(batch)
        loss.backward()
        assert same_bits(losses[-1], loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(same_bits, ours.parameters(), eager.parameters()))
    assert not same_bits(losses[0], losses[1])


def test_another_length_is_captured_again() -> None:
    torch.manual_seed(0)
    model = Model()
    long, short = torch.randn(9, 3, 6), torch.randn(7, 3, 6)
    step = capture_train_step(lambda model, x: model(x), model, long)
    for batch in (long, short, long):
        assert same_bits(step(batch), model(batch).detach())
    assert len(step.captures) == 2


@pytest.mark.parametrize("options", [{"bias": False}, {"num_layers": 2, "dropout": 0.5, "bidirectional": True}])
def test_sizes_that_vary(options: dict[str, Any]) -> None:
    """Both dims; the number of layers is in the states, whose batch dim varies, too."""
    torch.manual_seed(0)
    model, any_size = nn.LSTM(6, 4, batch_first=True, **options), torch.export.Dim.AUTO
    random = torch.Generator().manual_seed(1)
    batches = [torch.randn(*size, 6, generator=random, device="cpu") for size in ((3, 9), (5, 7), (2, 11))]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output, (hidden, cell) = model(x)
        return output.square().mean() + hidden.square().mean() + cell.square().mean()

    step = capture_train_step(loss_fn, model, batches[0], dynamic_shapes=({0: any_size, 1: any_size},))
    for index, batch in enumerate(batches):
        bits = []
        for run in (step, functools.partial(loss_fn, model)):
            model.zero_grad()
            torch.manual_seed(index)
            loss = run(batch)
            if run is not step:
                loss.backward()
            bits.append([loss.detach(), *(each.grad for each in model.parameters())])
        assert all(map(same_bits, *bits))
    assert len(step.captures) == 1


def test_a_tracer_that_does_not_tell_is_refused() -> None:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    model = nn.LSTM(3, 2)

    def train(x: torch.Tensor) -> list[torch.Tensor]:
        loss = model(x)[0].sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    traced = minimal_fx_tracer(train, module=model)(torch.ones(4, 3))
    with pytest.raises(CaptureError, match=r"^the model has an LSTM that runs in oneDNN, and its tracer does not"):
        read_traced_result(traced, model=model)
