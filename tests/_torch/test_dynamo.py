"""What Dynamo makes for its logs is made where they are on, and a size is a size in its graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo import guards, symbolic_convert

import graphpasses as gp
from graphpasses._torch.dynamo import nothing_made_for_logs, sizes_in_graphs


@pytest.mark.parametrize("name", ["output_graph.__trace_call", "guards.__guards"])
@pytest.mark.parametrize("is_on", [False, True])
def test_nothing_is_made_for_logs_that_are_off(name: str, is_on: bool) -> None:
    logger = logging.getLogger(f"torch._dynamo.{name}")
    level = logger.level
    before = symbolic_convert.get_funcname, guards.profile_guard_manager
    logger.setLevel(logging.DEBUG if is_on else logging.WARNING)
    try:
        with nothing_made_for_logs():
            inside = symbolic_convert.get_funcname, guards.profile_guard_manager
    finally:
        logger.setLevel(level)
    assert [a is b for a, b in zip(before, inside, strict=True)] == [is_on, is_on]
    assert (symbolic_convert.get_funcname, guards.profile_guard_manager) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.FloatTensor(x.shape),
        lambda x: torch.Tensor(size=x.size()),
        lambda x: torch.DoubleTensor(x.shape[:1]),
        lambda x: torch.FloatTensor(x[0, 0].shape),
        lambda x: torch.FloatTensor((4, 2)),  # a tensor of two numbers in eager, too
    ],
)
def test_a_tensor_of_a_size_is_not_one_of_its_numbers(make: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.ones(4, 2)

    def draw(x: Tensor) -> Tensor:
        return make(x).uniform_(-1, 1) * x.sum().view(x[0, 0].shape)

    torch.manual_seed(0)
    eager = draw(x)
    torch.manual_seed(0)
    assert torch.equal(gp.compile(draw, inner="aot_eager", fullgraph=True)(x), eager)


def test_torch_makes_a_tensor_of_a_sizes_numbers() -> None:
    """Once torch does as eager does, `sizes_in_graphs` can go."""

    def shape(x: Tensor) -> torch.Size:
        return torch.FloatTensor(x.shape).shape

    torch._dynamo.reset()
    assert torch.compile(shape, backend="eager")(torch.ones(4, 2)) == (2,)
    torch._dynamo.reset()
    with sizes_in_graphs():
        assert torch.compile(shape, backend="eager")(torch.ones(4, 2)) == (4, 2)
