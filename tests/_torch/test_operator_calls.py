"""Operators of eager, recorded without a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.operator_calls import OperatorCalls

X = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))


def operators(is_mode: bool, compute: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    x = X.clone().requires_grad_()
    with OperatorCalls(nn.Module(), {"x": x}, is_mode=is_mode) as record:
        compute(x).sum().backward()
    return [call.operator for call in record.calls]


def test_formulas_of_autograd_are_those_of_eager() -> None:
    """The product of all factors is divided by each."""
    assert "aten.div.Tensor" in operators(False, lambda x: x.prod(1))
    assert "aten.div.Tensor" not in operators(True, lambda x: x.prod(1))


def test_gradients_are_added_alike() -> None:
    """In place in eager; a user who writes in place does something else."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()

    assert operators(False, twice) == operators(True, twice)
    assert operators(False, lambda x: x.sin().add_(1)) != operators(False, lambda x: x.sin().add(1))


def test_no_mode_is_active() -> None:
    for is_mode in (False, True):
        with OperatorCalls(nn.Module(), {}, is_mode=is_mode):
            assert torch._C._len_torch_dispatch_stack() == is_mode


def test_operators_of_higher_order_are_seen_as_what_they_become() -> None:
    x = torch.ones(2, 2, dtype=torch.int8)
    with OperatorCalls(nn.Module(), {"x": x}, is_mode=False) as record:
        result = torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)
    assert result.tolist() == [[2, 2], [2, 2]]
    assert "aten.mm.default" in [call.operator for call in record.calls]


def test_parameters_are_made() -> None:
    """Of a result of an operator, by a class of its own."""
    with OperatorCalls(nn.Module(), {}, is_mode=False):
        parameter = nn.Parameter(torch.zeros(2) + 1)
        buffer = (torch.zeros(2) + 1).as_subclass(nn.Buffer)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.tolist() == buffer.tolist() == [1, 1]


def test_nothing_is_recorded_after_the_block() -> None:
    with OperatorCalls(nn.Module(), {}, is_mode=False) as record:
        X.sin()
    X.cos()
    assert [call.operator for call in record.calls] == ["aten.sin.default"]


def test_groups_are_recorded_by_their_ranks() -> None:
    def recorded(ranks: list[int]) -> list[Any]:
        name = dist.new_group(ranks).group_name
        with OperatorCalls(nn.Module(), {"x": x}) as record:
            torch.ops._c10d_functional.all_reduce.default(x, "sum", name)
        return [call.inputs for call in record.calls]

    x = torch.ones(2)
    with fake_process_group(4):
        assert recorded([0, 1]) == recorded([0, 1]) != recorded([0, 2])
