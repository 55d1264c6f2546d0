"""A function that adds the gradients of its own uses first, in eager or compiled alone, is refused if it matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphpasses
from graphpasses.errors import FidelityError

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

Call = Callable[..., Tensor]


def three_uses(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ weight).tanh()
    return x


def one_operator(x: Tensor, weight: Tensor) -> Tensor:
    """Reads the weight in an operator that reads it several times."""
    return x * nn.functional.cosine_similarity(x[:8], weight).sum()


region = torch.compiler.nested_compile_region(three_uses)


class Uses(nn.Module):
    """Calls a function once or several times, and uses its weight outside, too."""

    def __init__(self, call: Call, num_calls: int, is_used_outside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.call, self.num_calls, self.is_used_outside = call, num_calls, is_used_outside

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = self.call(x, self.weight)
        return (x @ self.weight).tanh() if self.is_used_outside else x


def gradient(model: Uses, call: Any) -> Tensor:
    loss = call(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))).square().mean()
    loss.backward()
    assert model.weight.grad is not None
    return model.weight.grad


def gradients(*args: Any) -> tuple[Tensor, Tensor]:
    eager, compiled = Uses(*args), Uses(*args)
    return gradient(eager, eager), gradient(compiled, graphpasses.compile(compiled, inner="aot_eager"))


REENTRANT: Call = partial(checkpoint, three_uses, use_reentrant=True)
NOT_REENTRANT: Call = partial(checkpoint, three_uses, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize(
    ("call", "num_calls", "is_used_outside", "advice"),
    [
        (REENTRANT, 1, True, "eager has one gradient .* use_reentrant=False"),
        (partial(checkpoint, one_operator, use_reentrant=True), 1, True, "eager has one gradient"),
        (region, 3, True, "eager adds .*Leave nested_compile_region"),
    ],
    ids=["reentrant", "one operator", "region"],
)
def test_added_otherwise(call: Call, num_calls: int, is_used_outside: bool, advice: str) -> None:
    with pytest.raises(
        FidelityError, match=rf"'weight' is used in the function .*test_uses.py:\d+ in forward.*{advice}"
    ):
        gradients(call, num_calls, is_used_outside)
    eager, theirs = Uses(call, num_calls, is_used_outside), Uses(call, num_calls, is_used_outside)
    assert not torch.equal(gradient(eager, eager), gradient(theirs, torch.compile(theirs, backend="aot_eager")))


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize(
    ("call", "num_calls", "is_used_outside"),
    [(REENTRANT, 1, False), (NOT_REENTRANT, 2, True)],
    ids=["alone", "added alike"],
)
def test_added_alike(call: Call, num_calls: int, is_used_outside: bool) -> None:
    eager, compiled = gradients(call, num_calls, is_used_outside)
    assert torch.equal(compiled, eager)


def test_uses_in_a_checkpointed_function_and_outside_of_the_graph() -> None:
    def trained(compile_model: Callable[[nn.Module], Any]) -> Tensor:
        model = Uses(NOT_REENTRANT, 1, False)
        call = compile_model(model)
        return gradient(model, lambda x: call(x) + model.weight.square().mean())

    theirs = trained(lambda model: model)
    assert torch.equal(trained(partial(graphpasses.compile, inner="aot_eager")), theirs)
    assert not torch.equal(trained(partial(torch.compile, backend="aot_eager")), theirs)
