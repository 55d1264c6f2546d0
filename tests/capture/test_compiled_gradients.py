"""Gradients of compiled graphs are eager's: none where the loss does not depend on an output, and added alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphpasses
from graphpasses.errors import UnsupportedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forget_compiled_code"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it
]


class Net(nn.Module):
    def __init__(self, num_uses: int = 1, has_break: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.num_uses, self.has_break = num_uses, has_break

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.num_uses):
            x = self.body(x).sin()
        other = self.other(x)
        if self.has_break:
            torch._dynamo.graph_break()
        return self.head(x), other.T


Loss = Callable[[Any, Tensor], Tensor]


def gradients(model: nn.Module, call: Any, loss: Loss) -> dict[str, Tensor | None]:
    loss(call, torch.randn(3, 4, generator=torch.Generator().manual_seed(1))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def eager(loss: Loss, **options: Any) -> dict[str, Tensor | None]:
    model = Net(**options)
    return gradients(model, model, loss)


def compiled(loss: Loss, inner: Any = "aot_eager", **options: Any) -> dict[str, Tensor | None]:
    model = Net(**options)
    return gradients(model, graphpasses.compile(model, inner=inner), loss)


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return all(equal(each, other[name]) for name, each in one.items())


def one_output(call: Any, x: Tensor) -> Tensor:
    return call(x)[0].square().mean()


def two_calls(call: Any, x: Tensor) -> Tensor:
    return (call(x)[0] - call(x / 2)[0]).square().mean()


@pytest.mark.parametrize("has_break", [False, True])
def test_what_the_loss_does_not_depend_on_has_no_gradient(has_break: bool) -> None:
    theirs = eager(one_output, has_break=has_break)
    assert theirs["other.weight"] is None
    assert same(compiled(one_output, has_break=has_break), theirs)
    if not has_break:
        assert compiled(one_output, "inductor")["other.weight"] is None
    model = Net(has_break=has_break)
    assert not same(gradients(model, torch.compile(model, backend="aot_eager"), one_output), theirs)


@pytest.mark.parametrize("num_uses", [1, 2])
def test_uses_in_several_calls_are_added_one_by_one(num_uses: int) -> None:
    theirs = eager(two_calls, num_uses=num_uses)
    assert same(compiled(two_calls, num_uses=num_uses), theirs)
    model = Net(num_uses=num_uses)
    function = graphpasses.compile(lambda x: two_calls(model, x), inner="aot_eager")
    assert same(gradients(model, None, lambda _, x: function(x)), theirs)
    model = Net(num_uses=num_uses)
    assert not same(gradients(model, torch.compile(model, backend="aot_eager"), two_calls), theirs)


def regularised(call: Any, x: Tensor) -> Tensor:
    weight = getattr(call, "_orig_mod", call).body.weight
    return one_output(call, x) + weight.square().sum()


@pytest.mark.parametrize("num_uses", [1, 2])
def test_uses_outside_of_what_is_compiled(num_uses: int) -> None:
    assert same(compiled(regularised, num_uses=num_uses), eager(regularised, num_uses=num_uses))


def test_what_the_loss_does_not_reach_has_no_gradient_of_several_uses() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(self.other(x).sin())

    def loss(call: Any, x: Tensor) -> Tensor:
        return call(x)[0].square().mean()

    model, theirs = Two(), Two()
    ours = gradients(model, graphpasses.compile(model, inner="aot_eager"), loss)
    assert ours["other.weight"] is None
    assert same(ours, gradients(theirs, theirs, loss))


def test_hooks_get_the_sum_of_all_uses() -> None:
    def hooked(call: Any, x: Tensor) -> Tensor:
        getattr(call, "_orig_mod", call).body.weight.register_hook(torch.neg)
        return regularised(call, x)

    assert same(compiled(hooked, num_uses=2), eager(hooked, num_uses=2))


def test_a_backward_that_does_not_reach_a_parameter_leaves_nothing_behind() -> None:
    model = Net(num_uses=2)
    call = graphpasses.compile(model, inner="aot_eager")
    torch.autograd.grad(one_output(call, torch.ones(3, 4)), [model.head.weight])
    (one_output(model, torch.ones(3, 4)) + model.body.weight.sum()).backward()  # eager's own


class Returns(nn.Module):
    """Returns a tensor, and what ``view`` makes of it; uses it, too."""

    def __init__(self, view: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.body, self.head, self.view = nn.Linear(4, 4), nn.Linear(4, 4), view

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x).sin()
        return *self.view(y), self.head(y)


@pytest.mark.filterwarnings("error:outputs")
@pytest.mark.parametrize("view", [lambda y: (y,), lambda y: (y, y[:, 0] * 1), lambda y: y.chunk(2)])
def test_outputs_that_share_no_element(view: Any) -> None:
    model = Returns(view)
    graphpasses.compile(model, inner="aot_eager")(torch.ones(3, 4))[0].sum().backward()


def test_outputs_that_are_views_of_one_tensor() -> None:
    model = Returns(lambda y: (y, y[:, 0]))
    with pytest.warns(UserWarning, match="outputs 0, 1 of a compiled graph are views of one tensor"):
        graphpasses.compile(model, inner="aot_eager")(torch.ones(3, 4))


class CheckpointsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, self.body(x), use_reentrant=False)


def test_a_checkpointed_function_that_writes() -> None:
    """Eager writes once more in backward."""
    model = CheckpointsNorm()
    written = "'norm.num_batches_tracked', 'norm.running_mean', 'norm.running_var'"
    with pytest.warns(UserWarning, match=f"a checkpointed function writes {written}"):
        graphpasses.compile(model, inner="aot_eager")(torch.randn(3, 4)).sum().backward()
    assert model.norm.num_batches_tracked == 1
    model(torch.randn(3, 4)).sum().backward()
    assert model.norm.num_batches_tracked == 3


class Replaced(nn.Module):
    def __init__(self, has_break: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.has_break = nn.Linear(8, 8), has_break

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        self.body.weight.data = self.body.weight * 0.9 + 0.1
        if self.has_break:
            torch._dynamo.graph_break()
        return self.body(x)


@pytest.mark.parametrize("has_break", [False, True])
def test_a_parameter_whose_data_forward_replaces(has_break: bool) -> None:
    """An alias that keeps uses apart was replaced, and the parameter was not; later uses accumulated apart."""
    models = Replaced(has_break), Replaced(has_break)
    for model, call in zip(models, (models[0], graphpasses.compile(models[1], inner="aot_eager")), strict=True):
        for seed in range(3):
            call(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        assert not torch.equal(model.body.weight, Replaced(has_break).body.weight)  # the control
    assert torch.equal(models[0].body.weight, models[1].body.weight)
    assert torch.equal(models[0].body.weight.grad, models[1].body.weight.grad)


def test_a_formula_that_decides_by_a_number_which_the_model_reads() -> None:
    """As TorchEasyRec's DLRM-HSTU repeats a parameter for each target: the gradient asks how often."""
    weight, counts = nn.Parameter(torch.randn(1, 4)), torch.tensor([1, 2])

    def read(counts: Tensor) -> Any:
        return counts.sum().item()

    def loss(read: Callable[[Tensor], Any]) -> Tensor:
        number = read(counts)
        return weight.tile(number, 1).square().sum()

    compiled = graphpasses.compile(loss, inner="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        with pytest.raises(UnsupportedError, match=r"reads at \S+test_compiled_gradients.py:\d+ in read: put torch"):
            compiled(read)
        assert torch.equal(compiled(torch.compiler.disable(read)), loss(read))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_gradient_of_a_gradient_is_refused_by_name(inner: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def penalty(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), model[0].weight)[0]

    compiled = graphpasses.compile(model, inner=inner)
    with pytest.raises(UnsupportedError, match=r"^a gradient of a gradient \(create_graph=True\) goes through a"):
        penalty(compiled)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(penalty(compiled), penalty(model))


class Half(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        y = self.norm(b)
        torch._dynamo.graph_break()
        return a * y


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Half(1), Half(2), Half(3)

    def forward(self, x: Tensor) -> Tensor:
        ys = self.one(x[:, :2] * 1).square(), self.two(x[:, :4] * 1).square(), self.three(x * 1).square()
        return ys[0].sum() + ys[1].sum() + ys[2].sum()


def test_a_gradient_whose_size_is_an_expression() -> None:
    """Modules of several sizes share a graph of any; that the half of it is a weight's size is guarded."""
    model, x, found = Halves(), torch.randn(4, 6), []
    for call in (model, graphpasses.compile(model, inner="aot_eager")):
        model.zero_grad()
        call(x).backward()
        found.append([grad for weight in model.parameters() if (grad := weight.grad) is not None])
    assert len(found[0]) == len(found[1]) == 6
    assert all(map(torch.equal, *found))
