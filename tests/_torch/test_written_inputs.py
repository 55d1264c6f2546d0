"""What forward reads of a buffer that it then writes has in a compiled backward the value that forward read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphpasses
from graphpasses._torch import aot_autograd
from graphpasses.capture.compile_options import Inner
from tests.helpers.models import same_bits

X = torch.arange(12.0).view(3, 4)


class Scaled(nn.Module):
    """Scales by a running statistic, also by a view of it, and then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.exp() * self.scale[None].clone()
        with torch.no_grad():
            self.scale.mul_(0.5)
        return y


class Normed(nn.Module):
    """Scales by a statistic that a batch norm then writes, whose output nobody reads and whose schema conceals it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        scaled = y * self.norm.running_mean.exp()  # type: ignore[union-attr,operator]
        self.norm(y)
        return scaled


class Copied(nn.Module):
    """Scales by a copy of what the caller writes before backward, as FBGEMM's lookups update by the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * self.scale.clone()  # type: ignore[operator]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(kind: type[nn.Module], compiled: bool, inner: Inner = "aot_eager") -> list[torch.Tensor]:
    """Returns the gradient of a model's weight, and its buffers."""
    torch.manual_seed(0)
    model = kind()
    run = graphpasses.compile(model, inner=inner) if compiled else model
    loss = run(X).square().sum()
    if kind is Copied:
        model.get_buffer("scale").mul_(0.5)
    loss.backward()
    return [model.get_parameter("linear.weight").grad, *model.buffers()]  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scaled, Normed, Copied])
def test_backward_reads_what_forward_read(kind: type[nn.Module]) -> None:
    before = [*kind().buffers()]
    _, *after = eager = trained(kind, compiled=False)
    assert not any(map(same_bits, after, before))
    assert all(map(same_bits, trained(kind, compiled=True), eager))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scaled, Normed, Copied])
def test_inductor_keeps_copies(kind: type[nn.Module]) -> None:
    eager, compiled = trained(kind, compiled=False), trained(kind, compiled=True, inner="inductor")
    torch.testing.assert_close(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scaled, Normed])
def test_torchs_partitioner_computes_it_again(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]) -> None:
    """The control, and why this is done."""
    monkeypatch.setattr(aot_autograd, "keep_reads_of_written", lambda module: None)
    assert not same_bits(trained(kind, compiled=True)[0], trained(kind, compiled=False)[0])


def test_statistics_stay_where_nobody_reads_the_norm() -> None:
    models = [Normed(), Normed()]
    models[1].load_state_dict(models[0].state_dict())
    step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), models[0], X)
    graphpasses.default_pipeline(graphpasses.BucketPlan.from_modules([])).run(step)(X)
    before = [each.clone() for each in models[1].buffers()]
    models[1](X)
    assert all(map(same_bits, models[0].buffers(), models[1].buffers()))
    assert not any(map(same_bits, models[0].buffers(), before))
