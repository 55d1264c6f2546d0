"""What ``loss_fn`` assigns to the ``data`` of a tensor: the tensor then lies in other memory, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.arange(16.0).reshape(4, 4).sin()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    made.register_buffer("average", torch.ones(4))
    return made


def trained_weight(model: Any, x: torch.Tensor) -> torch.Tensor:
    model[2].weight.data = F.normalize(model[2].weight.data, dim=1)
    return model(x).square().mean()


def after_it_was_read(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model[2].weight.data = model[2].weight.data * 1.5  # which backward reads
    return y.square().mean()


def views_keep_the_old(model: Any, x: torch.Tensor) -> torch.Tensor:
    row = model[2].weight.data[0]
    model[2].weight.data = model[2].weight.data * 1.5
    model[2].weight.data.add_(0.25)
    return (model(x) * row.add_(1)).square().mean()


def what_was_assigned_is_written(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = model.average * 0.9 + x.mean(0)
    model.average.data = value
    value.mul_(2)
    return (model(x) * model.average).square().mean(), value


def a_result_that_backward_reads(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model[1](model[0](x))
    view = y[:, :2]
    y.data = y.data.round()
    return model[2](y).square().mean() + view.sum()


def in_backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x)
    y.register_hook(lambda gradient: setattr(model.average, "data", gradient.mean(0)))
    return (model[2](y) * model.average).square().mean()


def moved_to_where_it_is(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.to(x.device, x.dtype)(x * model.average).square().mean()


def trained(loss_fn: Callable[..., Any], step_of: Callable[..., Any]) -> list[torch.Tensor]:
    """Returns all that three steps compute and leave, and what the memory holds that the model had before each."""
    trained, results, memory = model(), [], []
    optimizer, step = torch.optim.SGD(trained.parameters(), lr=0.5), step_of(loss_fn, trained)
    for scale in (1.0, 2.0, 3.0):
        memory += [tensor.data for tensor in trained.state_dict().values()]
        result = step(X * scale)
        results += [each.detach().clone() for each in (result if isinstance(result, tuple) else (result,))]
        optimizer.step()
        optimizer.zero_grad()
        results += map(torch.clone, trained.state_dict().values())
    return results + memory


def eager(loss_fn: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        result = loss_fn(model, x)
        (result[0] if isinstance(result, tuple) else result).backward()
        return result

    return step


def captured(loss_fn: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    before = [(tensor, tensor.data_ptr()) for tensor in model.state_dict().values()]
    step = default_pipeline(BucketPlan.from_modules([])).run(capture_train_step(loss_fn, model, X))
    step.check(2 * X)
    assert all(tensor.data_ptr() == address for tensor, address in before)
    return step


FOLLOWED = [
    trained_weight,
    after_it_was_read,
    views_keep_the_old,
    what_was_assigned_is_written,
    a_result_that_backward_reads,
    in_backward,
    moved_to_where_it_is,
]


@pytest.mark.parametrize("loss_fn", FOLLOWED)
def test_other_memory_is_followed(loss_fn: Callable[..., Any]) -> None:
    expected, found = trained(loss_fn, eager), trained(loss_fn, captured)
    assert len(expected) == len(found)
    assert all(map(same_bits, expected, found))


def test_memory_that_is_not_assigned_differs() -> None:
    def without(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    assert not all(map(same_bits, trained(trained_weight, eager), trained(without, captured)))


class Momentum(nn.Module):
    """Reads by a copy of an encoder that follows it, as MoCo's published code has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4)
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.encoder.parameters(), self.follower.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * (1.0 - 0.9)
            key = self.follower(x)
        return (self.encoder(x) - 2 * key).square().mean()


def test_an_encoder_that_follows_another() -> None:
    ours, theirs = Momentum(), Momentum()
    optimizers = [torch.optim.SGD(each.encoder.parameters(), lr=0.5) for each in (ours, theirs)]
    step = capture_train_step(lambda model, x: model(x), ours, X, optimizer=optimizers[0])
    for scale in (1.0, 2.0, 3.0):
        loss = theirs(scale * X)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert same_bits(step(scale * X), loss.detach())
    assert all(map(same_bits, ours.state_dict().values(), theirs.state_dict().values()))


def of_another(model: Any, x: torch.Tensor) -> None:
    model[2].weight.data = model[0].weight.data


def of_two(model: Any, x: torch.Tensor) -> None:
    model[0].weight.data = model[2].weight.data = model[2].weight.data * 2


def of_the_batch(model: Any, x: torch.Tensor) -> None:
    model[2].weight.data = x.data


def to_the_batch(model: Any, x: torch.Tensor) -> None:
    x.data = x.data * 2


def and_replaced(model: Any, x: torch.Tensor) -> None:
    model.average.data = model.average.data * 2
    model.average = model.average + 1


def of_another_dtype(model: Any, x: torch.Tensor) -> None:
    model.average.data = model.average.data.double()


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (of_another, "loss_fn assigns memory of another tensor to the .data of '2.weight'; assign a clone of it"),
        (of_two, "loss_fn assigns memory of another tensor to the .data of '2.weight'; assign a clone of it"),
        (of_the_batch, "loss_fn assigns memory of another tensor to the .data of '2.weight'; assign a clone of it"),
        (to_the_batch, "a tensor of shape [4, 4], torch.float32, gets other memory while loss_fn runs"),
        (and_replaced, "loss_fn assigns to the .data of 'average', and replaces it; do one of both"),
        (of_another_dtype, "loss_fn gives 'average' another shape in place (([4], [1], torch.float32)"),
    ],
)
def test_memory_that_cannot_be_followed(assign: Callable[[Any, torch.Tensor], None], message: str) -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        assign(model, x)
        return model(x).square().mean()

    made = model()
    before = [(tensor, tensor.data_ptr()) for tensor in made.state_dict().values()]
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, made, X.clone(), check=False)
    assert str(caught.value).startswith(message)
    assert all(tensor.data_ptr() == address for tensor, address in before)


def test_an_optimizer_in_the_step() -> None:
    made = model()
    with pytest.raises(CaptureError) as caught:
        capture_train_step(trained_weight, made, X, optimizer=torch.optim.SGD(made.parameters(), lr=0.5))
    assert str(caught.value) == (
        "loss_fn replaces '2.weight', or assigns to its .data, and a captured update would write what was there. "
        "Capture without optimizer=, and call optimizer.step() after the step; or write it in place"
    )
