"""What tells values apart, and how owners are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphpasses as gp
from graphpasses.errors import CaptureError
from graphpasses.state.keys import are_alike, key_of
from graphpasses.state.optimizers import Optimizers, is_number, with_numbers
from graphpasses.state.slots import Asked, read


def test_keys() -> None:
    assert key_of([1, 2.0]) != key_of([1, 2])
    assert key_of([1, {"a": None}]) == key_of([1, {"a": None}])


class Silent(tuple[Any, ...]):
    """Says nothing of its items, as e3nn's ``Irrep`` does."""

    def __len__(self) -> int:
        raise NotImplementedError

    __iter__ = __contains__ = __len__  # type: ignore[assignment]


def test_containers_that_have_other_methods() -> None:
    """A container's items are those that Python's own class finds."""
    one, same, other = Silent((1, [2])), Silent((1, [2])), Silent((1, [3]))
    assert key_of(one) == key_of(same) != key_of(other)
    assert are_alike({"a": one}, {"a": same}, {})
    assert not are_alike({"a": one}, {"a": other}, {})
    model = torch.nn.Linear(2, 2)
    step = gp.capture_train_step(
        lambda model, x: model(x).sum() * tuple.__getitem__(one, 0), model, torch.ones(2), recapture=False
    )
    one[1].append(4)
    with pytest.raises(CaptureError, match=r"one\[1\]"):
        step(torch.ones(2))


class Scale:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: float) -> float:
        return self.factor * x


def recursive(factor: float) -> Callable[[int], float]:
    def power(n: int) -> float:
        return factor * power(n - 1) if n else 1.0

    return power


def with_default(factor: float) -> Callable[[float], float]:
    return lambda x, factor=factor: x * factor


HELD: dict[str, Callable[[float], Any]] = {
    "a closure": lambda factor: lambda x: x * factor,
    "a closure that holds itself": recursive,
    "a default": with_default,
    "a method": lambda factor: Scale(factor).apply,
    "a partial": lambda factor: partial(pow, factor),
    "an object of torch": lambda factor: torch.distributions.Normal(torch.tensor(0.0), torch.tensor(factor)),
    "a namespace in a dict": lambda factor: {"a": SimpleNamespace(scale=Scale(factor))},
    "an object of C": lambda factor: [re.compile(str(factor))],
}


@pytest.mark.parametrize("make", HELD.values(), ids=[*HELD])
def test_what_models_built_alike_hold(make: Callable[[float], Any]) -> None:
    assert are_alike(make(2.0), make(2.0), {})
    assert not are_alike(make(2.0), make(3.0), {})


def test_what_is_itself_alone() -> None:
    """A step draws from the generator, and runs the module, that it was captured with."""
    for make in (torch.Generator, torch.nn.ReLU):
        assert not are_alike(partial(print, make()), partial(print, make()), {})
    own, other = torch.nn.ReLU(), torch.nn.ReLU()
    assert are_alike(own.forward, other.forward, {(id(own), id(other)): None})


def test_read() -> None:
    assert read({"a": 1}, "a") == 1
    assert read(Asked(torch.get_default_dtype), "the default dtype") == torch.float32


def test_numbers_of_optimizers() -> None:
    assert [is_number(each) for each in (0.1, True, torch.tensor(0.1))] == [True, False, False]
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizers = Optimizers((optimizer,))
    assert optimizers.kept({}).numbers(optimizers)[0, "betas[1]"] == 0.999
    group = with_numbers({"lr": 1.0, "betas": (0.9, 0.99)}, {"betas[0]": 0.5})
    assert group == {"lr": 1.0, "betas": (0.5, 0.99)}


def test_several_optimizers_have_one_list_of_groups() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    both = Optimizers((torch.optim.SGD([first]), torch.optim.Adam([second], betas=(0.8, 0.9))))
    assert (both.name, both.group_name(1)) == ("SGD and Adam", "group 0 of Adam")
    assert both.groups[1][1]["betas"] == (0.8, 0.9)
