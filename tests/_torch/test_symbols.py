"""Sizes that only running tells."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, optimization_hint

import graphpasses
from graphpasses._torch.symbols import guessed_sizes
from graphpasses.capture import capture_train_step


def test_sizes_have_one_guess_for_a_while() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        a, b = (shape_env.create_unbacked_symint() for _ in range(2))
        for size in (a, b):
            torch._check(size >= 0)
        value = torch.empty(a, 3)
        torch._dynamo.override_optimization_hint(b, 7)
        assert mode.shape_env is shape_env
        with guessed_sizes([value], guess=10):
            assert (optimization_hint(3 * a + 5), optimization_hint(a + b)) == (35, 17)
        assert optimization_hint(b) == 7
        assert optimization_hint(a, fallback=99) == 99


def test_values_without_symbols() -> None:
    with guessed_sizes([torch.ones(2), 3]):
        pass
    with FakeTensorMode():
        value = torch.empty(2)
    with guessed_sizes([value]):
        pass


@pytest.mark.parametrize("num_first", [1, 2])
def test_one_row_that_is_put_at_an_index_decides(num_first: int) -> None:
    """Eager removes its leading dim, by which a gradient of -0 becomes 0: the control."""

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(4, 3)
        found[torch.where(mask)] = model(x)[torch.where(mask)]
        return found.square().sum()

    batches = [(torch.ones(4, 3), torch.arange(4) < number) for number in (num_first, 3, 1, 2)]
    model = nn.Linear(3, 3)
    step = capture_train_step(loss_fn, model, *batches[0])
    for batch in batches:
        step.check(*batch)
    assert len(step.captures) == 2

    gradients = []
    for row in (torch.ones(1, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)):
        found = torch.zeros(4, 3)
        found[torch.arange(len(row))] = row
        (found * -0.0).sum().backward()
        assert row.grad is not None
        gradients.append(row.grad[0])
    assert [bool(gradient.signbit().any()) for gradient in gradients] == [False, True]


class Indexed(nn.Module):
    """Takes items by an index with slices, of dims that vary."""

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.linear, self.stop = nn.Linear(6, 6), stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y.t()[:, : self.stop].t().logsumexp(0)


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * torch.linspace(0.5, 1.5, 6)).sum()


def have_eagers_bits(stop: int | None) -> bool:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Indexed(stop)
    compiled = graphpasses.compile(model, inner="aot_eager")
    are_equal = []
    for number in (12, 16, 9, 7, 33):
        x, gradients = torch.randn(number, 6), []
        for each in (model, compiled):
            model.zero_grad()
            losses(each, x).backward()
            gradients.append(model.linear.bias.grad)
        are_equal.append(torch.equal(*gradients))  # type: ignore[arg-type]
    return all(are_equal)


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("stop", [None, 9])
def test_slices_of_whole_dims_are_left_out(stop: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager leaves them out of an index; the control is torch's trace."""
    assert have_eagers_bits(stop)
    monkeypatch.setattr("graphpasses._torch.fake_mode.indices_of_eager", nullcontext)
    assert not have_eagers_bits(stop)


def test_a_captured_step_leaves_them_out() -> None:
    model = Indexed(None)
    step = capture_train_step(losses, model, torch.randn(8, 6), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert not step.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    step.check(torch.randn(33, 6))
