"""What decides nothing: comparisons that no draw changes, and what is asserted, as torch.distributions has it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributions import Normal

from graphpasses.capture import capture_train_step
from graphpasses.capture.checks import certain_value
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.identity import same_bits

aten = torch.ops.aten
COMPARISONS = {
    operator.lt: aten.lt.Scalar,
    operator.le: aten.le.Scalar,
    operator.gt: aten.gt.Scalar,
    operator.ge: aten.ge.Scalar,
}


def value_of(target: Any, bound: Any, draw: Any = aten.rand.default) -> bool | None:
    graph = fx.Graph()
    compared = graph.call_function(target, (graph.call_function(draw, ([],)), bound))
    return certain_value(graph.call_function(aten._local_scalar_dense.default, (compared,)))


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("bound", [-1, -0.5, 0, 0.0, 0.5, 1, 1.0, 1.5])
def test_all_that_can_be_drawn_says_the_same(compare: Any, bound: float) -> None:
    said = {compare(drawn, bound) for drawn in (0.0, 0.25, 0.75, 1.0)}  # 1 in low precision
    assert value_of(COMPARISONS[compare], bound) == (said.pop() if len(said) == 1 else None)


def test_near_misses() -> None:
    assert value_of(aten.lt.Scalar, 0.0, aten.randn.default) is None
    assert value_of(aten.eq.Scalar, -1) is None
    graph = fx.Graph()
    drawn, bound = graph.call_function(aten.rand.default, ([],)), graph.placeholder("bound")
    compared = graph.call_function(aten.lt.Scalar, (drawn, bound))
    assert certain_value(graph.call_function(aten._local_scalar_dense.default, (compared,))) is None
    assert certain_value(graph.call_function(aten._local_scalar_dense.default, (drawn,))) is None


def policy_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As PPO has it: a distribution whose parameters a model computes checks them, and what it is asked about."""
    mean, deviation = model(x).unbind(1)
    policy = Normal(mean, deviation.exp(), validate_args=True)  # the default, until Dynamo sets another
    return -policy.log_prob(policy.sample() + 1).mean() - policy.entropy().mean()


def test_distributions_check_what_parameters_compute() -> None:
    torch.manual_seed(0)
    model, eager, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.randn(6, 4)
    eager.load_state_dict(model.state_dict())
    step = capture_train_step(policy_loss, model, x)
    losses = []
    for run in (lambda: step(x), lambda: policy_loss(eager, x), lambda: policy_loss(eager, 2 * x)):
        torch.manual_seed(1)
        losses.append(run())
    losses[1].backward()
    assert same_bits(losses[0], losses[1].detach())
    assert not same_bits(losses[0], losses[2].detach())
    assert torch.equal(step.model.weight.grad, eager.weight.grad)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"loss_fn raises an error at .*test_certain_values\.py:\d+ in policy_loss"
    ):
        step(torch.full_like(x, torch.nan))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        policy_loss(eager, torch.full_like(x, torch.nan))  # as ever, once the capture is over
    step = capture_train_step(lambda model, x: model(x).sum() if (model(x) < 9).all() else model(x).mean(), model, x)
    assert step.guards is not None


def test_a_decision_by_a_sum_of_fractions_is_not_told_by_how_it_is_rounded() -> None:
    """Sympy adds constants first: to it 0.10000000000000003 + 0.1 + 0.2 is above 0.4."""
    value = torch.tensor(0.3, dtype=torch.float64)
    model, x = nn.Linear(2, 1), torch.ones(1, 2)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * (2.0 if value.item() + 0.1 + 0.2 > 0.4 else 3.0)

    step = capture_train_step(loss_fn, model, x)
    for other in (0.3, 0.2, 0.05):
        value.fill_(other)
        assert step(x) == loss_fn(model, x)
    assert len(step.captures) == 2
    value.fill_(0.10000000000000003)
    with pytest.raises(FidelityError, match="part at operator"):
        step(x)


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Asks whether a mask masks anything, as Transformer-XL does."""
    y = model(x)
    mask = torch.triu(y.new_ones(2, 2), diagonal=len(x) - 1) * torch.ones_like(y) > y.new_full((), 0.5)
    return (y.masked_fill(mask, 0.0) if mask.any().item() else y + 1).square().mean()


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_decision_by_a_tensor_that_is_only_shaped_like_another(num_rows: int) -> None:
    model, x = nn.Linear(2, 2), torch.arange(2.0 * num_rows).reshape(num_rows, 2)
    step = capture_train_step(masked, model, x)
    assert same_bits(step(x), masked(model, x).detach())


def test_a_decision_by_a_tensor_that_is_made_with_a_computed_number() -> None:
    """Of what it is shaped like more than the shape counts."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() if torch.full_like(y, (y > 0).sum().item()).sum() > 3 else y.mean()

    model, x = nn.Linear(2, 2, bias=False), torch.ones(2, 2)
    nn.init.ones_(model.weight)
    step = capture_train_step(loss_fn, model, x)
    for each in (x, -x, 3 * x, -3 * x):
        assert same_bits(step(each), loss_fn(model, each).detach())
    assert len(step.captures) == 2


def test_a_decision_by_a_tensor_of_a_computed_size() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() if y.new_full((int((y > 0).sum().item()) + 2, 2), 1).sum() > 3 else y.mean()

    with pytest.raises(CaptureError, match="depends on parameter"):
        capture_train_step(loss_fn, nn.Linear(2, 2), torch.ones(2, 2))
