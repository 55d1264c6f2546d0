"""Views that a compiled graph returns have the strides that eager's have, and may be written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphpasses as gp


def channels_first(x: Tensor) -> Tensor:
    return (x * 2).permute(0, 3, 1, 2)


def and_a_written_input(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    count += 1
    return channels_first(x), (x * count).sum()


def of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = x * 2, x * 3
    return y.permute(0, 3, 1, 2), z.unsqueeze(0).expand(1, *z.shape)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [channels_first, and_a_written_input, of_two])
def test_a_returned_view_has_eagers_strides(function: Callable[..., Tensor], dynamic: bool) -> None:
    """A dim of size 1 has a stride, by which kernels choose in which order they write channels."""
    torch._dynamo.reset()
    given = (torch.zeros(()),) if function is and_a_written_input else ()
    found = []
    for call in (function, gp.compile(function, inner="aot_eager", dynamic=dynamic)):
        x = torch.arange(32.0).view(2, 4, 4, 1).requires_grad_()
        y = first(call(x, *given))
        strides = y.stride()
        y.mul_(x.detach().sum())
        y.square().sum().backward()
        assert x.grad is not None
        found.append((strides, y.detach(), x.grad))
    (strides, *eager), (ours, *compiled) = found
    assert strides == ours == (16, 1, 4, 1)
    assert all(map(torch.equal, eager, compiled))


def test_torch_gives_it_others() -> None:
    """Once torch keeps them, `hide_view` can go."""
    torch._dynamo.reset()
    x = torch.ones(2, 4, 4, 1, requires_grad=True)
    assert torch.compile(channels_first, backend="aot_eager")(x).stride() == (16, 16, 4, 1)
