"""Parameters that forward replaces by others, as a codebook that follows its inputs: a step leaves new ones, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.arange(24.0).reshape(6, 4).cos()


class Codebook(nn.Module):
    """Quantizes as zalandoresearch/pytorch-vq-vae does: no gradient reaches the codes, which forward replaces."""

    def __init__(self, decay: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decay = decay
        self.linear = nn.Linear(4, 4)
        self.codes = nn.Embedding(3, 4)
        self.sums = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("sizes", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        chosen = F.one_hot(torch.cdist(y, self.codes.weight).argmin(1), 3).float()
        found = chosen @ self.codes.weight
        self.sizes = self.sizes * self.decay + (1 - self.decay) * chosen.sum(0)
        self.sums = nn.Parameter(self.sums * self.decay + (1 - self.decay) * (chosen.t() @ y))
        self.codes.weight = nn.Parameter(self.sums / self.sizes[:, None])
        return (y + (found - y).detach()).square().mean() + F.mse_loss(found.detach(), y)


class Replaced(Codebook):
    """Trains what it replaces then, which the optimizer goes on to hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.linear(x) @ self.sums.t()).square().mean()
        self.sums = nn.Parameter(self.sums.data * self.decay)
        return loss


def trained(model: Codebook, step_of: Callable[..., Any]) -> list[Any]:
    """Returns the parameters, buffers and gradients after each of three steps, and whether ``sums`` is another."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[Any]()
    step = step_of(model)
    for scale in (1.0, 2.0, 3.0):
        before, gradient = model.sums, model.sums.grad
        found.append(step(scale * X).detach())
        found += [model.sums is before, before.grad is gradient, model.sums.requires_grad, model.sums.grad is None]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.detach().clone() for each in model.state_dict().values()]
    return [*found, *(each.detach() for group in optimizer.param_groups for each in group["params"])]


def eager(model: nn.Module) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        return loss

    return step


def captured(model: nn.Module, optimizer: Any = None) -> Callable[..., torch.Tensor]:
    before = [*model.parameters()]
    step = capture_train_step(lambda model, x: model(x), model, X, optimizer=optimizer)
    step = default_pipeline(BucketPlan.from_modules([])).run(step)
    step.check(2 * X)
    assert all(map(torch.Tensor.is_set_to, model.parameters(), before))
    return step


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = [*zip(ours, theirs, strict=True)]
    return all(same_bits(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in pairs)


def test_a_step_replaces_what_forward_replaces() -> None:
    expected = trained(Codebook(), eager)
    assert alike(trained(Codebook(), captured), expected)
    assert not alike(trained(Codebook(0.25), eager), expected)


def test_the_gradient_of_what_was_there() -> None:
    assert alike(trained(Replaced(), captured), trained(Replaced(), eager))


def trains_the_new(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.sums = nn.Parameter(model.sums.data * 0.5)
    return (model.linear(x) @ model.sums.t()).mean()


def trains_a_new_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.sizes = torch.ones(3, requires_grad=True)
    return (model.linear(x) @ model.sums.t() * model.sizes).mean()


def freezes(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.sums = nn.Parameter(model.sums.data * 0.5, requires_grad=False)
    return (model.linear(x) @ model.sums.t()).mean()


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            trains_the_new,
            "forward puts another tensor in the place of 'sums' and trains that, which no optimizer holds",
        ),
        (trains_a_new_buffer, "forward puts another tensor in the place of 'sizes' and trains that, which no"),
        (freezes, "forward replaces parameter 'sums', torch.float32[3, 4] on cpu, by torch.float32[3, 4] on cpu wi"),
    ],
)
def test_what_a_step_cannot_leave(loss_fn: Callable[..., torch.Tensor], message: str) -> None:
    model = Codebook()
    before = model.sums
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, model, X, check=False)
    assert str(caught.value).startswith(message)
    assert model.sums is before


@pytest.mark.parametrize(("made", "name"), [(Replaced, "sums"), (Codebook, "(sums|codes.weight)")])
def test_an_optimizer_that_holds_what_was_there(made: type[Codebook], name: str) -> None:
    model = made()
    with pytest.raises(
        CaptureError, match=rf"^loss_fn replaces '{name}', or assigns to its \.data, and a captured upd"
    ):
        captured(model, torch.optim.SGD(model.parameters(), lr=0.5))
