"""Formulas of autograd that look whether they are traced: the step has eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpasses
from graphpasses.capture import capture_train_step
from graphpasses.identity import same_bits
from graphpasses.ops.eager_gradient import MASKED_PLACE

X = torch.arange(1.0, 9.0).view(2, 4)
Loss = Callable[[torch.Tensor], torch.Tensor]

ELEMENTS: dict[str, Loss] = {
    "max": lambda y: y.max(),
    "min": lambda y: y.t().min(),
    "median": lambda y: y.median(),
    "nanmedian": lambda y: y.nanmedian(),
}
VALUES = {"negative": -1.0, "infinite": torch.inf, "nan": torch.nan}


def scaled(element: Loss) -> Callable[..., torch.Tensor]:
    return lambda model, x, scale: element(model(x)) * scale


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_one_element_of_all(name: str, value: str) -> None:
    """A gradient that is negative, or infinite, shows what is a mask times it, and what is written into zeros."""
    model, loss_fn = nn.Linear(4, 3), scaled(ELEMENTS[name])
    step = capture_train_step(loss_fn, model, X, torch.tensor(1.0))
    batch = X, torch.tensor(VALUES[value])
    assert same_bits(step(*batch), loss_fn(model, *batch).detach())
    ours, model.bias.grad = model.bias.grad, None
    loss_fn(model, *batch).backward()
    assert ours is not None
    assert model.bias.grad is not None
    assert same_bits(ours, model.bias.grad)


PRODUCTS: dict[str, Loss] = {
    "prod": lambda y: y.prod().float(),
    "prod of a dim": lambda y: y.prod(1, keepdim=True, dtype=torch.float64).float(),
    "cumprod": lambda y: y.cumprod(1),
    "twice": lambda y: y.cumprod(0).cumprod(1) * y.prod(),
}


class Scaled(nn.Module):
    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.scale, self._function = nn.Parameter(torch.ones(2, 4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self.scale * x)


def weighted(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y * torch.linspace(-0.5, 1.5, y.numel()).view(y.shape)).sum()


def gradient(model: nn.Module, run: Callable[[], object]) -> torch.Tensor:
    model.scale.grad = None
    run()
    assert isinstance(model.scale.grad, torch.Tensor)
    return model.scale.grad


def batches() -> list[torch.Tensor]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    return [x, x.relu(), x.round(), x / 0, torch.ones(2, 4)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    """Captured on ones, of which both formulas make the same bits."""
    model = Scaled(PRODUCTS[name])
    step = capture_train_step(weighted, model, torch.ones(2, 4), check=False)
    for x in batches():
        expected = gradient(model, lambda x=x: weighted(model, x).backward())
        assert same_bits(gradient(model, lambda x=x: step(x)), expected)


def read_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) + model(2 * x)).max()


def logged(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ((y := model(x)) + y + y).square().sum(), y.cumprod(0)


@pytest.mark.parametrize("loss_fn", [lambda model, x: model(x).max(), read_twice, logged])
def test_the_last_call(loss_fn: Callable[..., Any]) -> None:
    """What the engine adds has the number of the last call, whose gradient it is not."""
    model = Scaled(torch.sin)
    step = capture_train_step(loss_fn, model, batches()[0], check=False)
    found = [gradient(model, lambda x=x: step(x)) for x in batches()]
    results = [loss_fn(model, x) for x in batches()]
    losses = [each[0] if isinstance(each, tuple) else each for each in results]
    expected = [gradient(model, loss.backward) for loss in losses]
    assert all(map(same_bits, found, expected))
    assert not same_bits(expected[0], expected[1])


def test_the_last_call_behind_a_trace_whose_backward_raised() -> None:
    """Torch told what is traced behind a backward from its sums no more."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling() or graphpasses._torch.fake_mode.is_fake(gradient):
                raise ZeroDivisionError("of a trace")
            return gradient

    with pytest.raises(ZeroDivisionError, match="of a trace"):
        capture_train_step(lambda model, x: Raises.apply(model(x)).sum(), Scaled(torch.sin), batches()[0])
    test_the_last_call(logged)


def test_the_last_call_compiled() -> None:
    torch._dynamo.reset()
    model, (x, *_) = Scaled(torch.sin), batches()
    compiled = graphpasses.compile(read_twice, inner="aot_eager")
    found = gradient(model, lambda: compiled(model, x).backward())
    assert same_bits(found, gradient(model, lambda: read_twice(model, x).backward()))
    assert not same_bits(found, gradient(model, lambda: read_twice(model, -x).backward()))


def test_the_first_update() -> None:
    """It runs the step without its update, and the optimizer's own step, which makes its state."""
    found = {}
    for seed in (0, 1):
        for is_captured in (True, False):
            model, x = Scaled(PRODUCTS["prod"]), torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            if is_captured:
                capture_train_step(weighted, model, x, optimizer=optimizer)(x)
            else:
                weighted(model, x).backward()
                optimizer.step()
            found[seed, is_captured] = optimizer.state[model.scale]["momentum_buffer"]
    assert all(same_bits(found[seed, True], found[seed, False]) for seed in (0, 1))
    assert not same_bits(found[0, False], found[1, False])


class Filled(nn.Module):
    """Fills masks by a value that is trained, in place, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * 1).masked_fill_(mask.t(), self.scale).masked_fill(mask[0], self.scale)


def filled(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (model(x, mask) * torch.linspace(-0.3, 1.7, x.numel()).view(x.shape)).sum()


def test_masks_filled_by_a_value_that_is_trained() -> None:
    """Eager adds up the gradients of the mask alone. Captured on a mask of nothing, for which all sums are alike."""
    model, x = Filled(), torch.ones(37, 37)
    step = capture_train_step(filled, model, x, torch.zeros(37, 37, dtype=torch.bool))
    for seed in range(3):
        mask = torch.rand(37, 37, generator=torch.Generator().manual_seed(seed)) < 0.4
        expected = gradient(model, lambda mask=mask: filled(model, x, mask).backward())
        assert same_bits(gradient(model, lambda mask=mask: step(x, mask)), expected)


class Selected(nn.Module):
    """The strides of a gradient decide how the backward of a norm rounds."""

    def __init__(self, select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.norm, self.select = nn.Parameter(torch.ones(8, 1)), nn.BatchNorm1d(8), select

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.select(self.norm(self.scale * x).transpose(1, 2), mask.unsqueeze(-1))


def far(model: nn.Module, x: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x, mask), target.masked_select(mask.unsqueeze(-1)))


def test_what_a_mask_selects() -> None:
    """Control: a gradient that is laid out anew has other bits. The loss compares the numbers of what is selected."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(4, *shape, generator=generator) for shape in ((8, 10), (10, 8)))
    model = Selected(torch.masked_select)
    masks = [torch.rand(4, 10, generator=generator) < share for share in (0.3, 0.5, 0.8)]
    step = capture_train_step(far, model, x, masks[0], target)
    placed, *_ = step.graph.find_nodes(op="call_function", target=MASKED_PLACE)
    (back,) = placed.users
    assert back.meta["val"].stride() == (80, 10, 1)  # as the norm's output has
    laid_out = Selected(lambda y, mask: y.contiguous().masked_select(mask))
    differs = []
    for mask in masks:
        expected = gradient(model, lambda mask=mask: far(model, x, mask, target).backward())
        assert same_bits(gradient(model, lambda mask=mask: step(x, mask, target)), expected)
        other = gradient(laid_out, lambda mask=mask: far(laid_out, x, mask, target).backward())
        differs.append(not same_bits(other, expected))
    assert any(differs)


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_what_a_mask_selects_compiled(ours: bool) -> None:
    """Control: ``torch.compile`` alone has other bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, mask = Selected(torch.masked_select), torch.randn(4, 8, 10), torch.rand(4, 10) < 0.5
    compiled: Any = (
        graphpasses.compile(model, inner="aot_eager") if ours else torch.compile(model, backend="aot_eager")
    )
    expected, found = (
        gradient(model, lambda call=call: call(x, mask).square().mean().backward()) for call in (model, compiled)
    )
    assert same_bits(found, expected) == ours


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prod", "twice", "max"])
def test_compiled_products(name: str) -> None:
    """Control: ``torch.compile`` alone has other bits."""
    torch._dynamo.reset()
    model = Scaled({**PRODUCTS, **ELEMENTS}[name])
    compiled: dict[bool, Any] = {
        True: graphpasses.compile(model, inner="aot_eager"),
        False: torch.compile(model, backend="aot_eager"),
    }
    for ours, call in compiled.items():
        equal = [
            same_bits(
                gradient(model, lambda x=x, call=call: weighted(call, x).backward()),
                gradient(model, lambda x=x: weighted(model, x).backward()),
            )
            for x in batches()
        ]
        assert all(equal) == ours


def test_products_without_a_gradient() -> None:
    model = nn.Linear(4, 3)
    step = capture_train_step(lambda model, x: model(x).sum() * model(x).detach().prod() / x.prod(), model, X)
    assert same_bits(step(X), (model(X).sum() * model(X).prod() / X.prod()).detach())


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("how", [{"size": True}, {"scale_factor": 1.5}])
def test_resized_to_sizes_that_vary_compiled(mode: str, how: dict[str, Any]) -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        given = {"size": x.shape[-2:]} if "size" in how else how
        return nn.functional.interpolate(model(x), mode=mode, **given).square().mean()

    models = [nn.Conv2d(1, 2, 3, stride=2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = graphpasses.compile(forward, inner="aot_eager")
    for size in (9, 8, 11):
        x = torch.randn(2, 1, size, 7, generator=torch.Generator().manual_seed(size))
        losses = [run(model, x) for run, model in zip((forward, compiled), models, strict=True)]
        for loss in losses:
            loss.backward()
        assert same_bits(*losses)
        assert same_bits(*(model.weight.grad for model in models))
