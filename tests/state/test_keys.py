"""What tells values apart, and how owners are read."""

from __future__ import annotations

import torch

from graphpasses.state.hyperparameters import is_number, numbers_of, with_numbers
from graphpasses.state.keys import key_of
from graphpasses.state.optimizers import Optimizers
from graphpasses.state.slots import Asked, read


def test_keys() -> None:
    assert key_of([1, 2.0]) != key_of([1, 2])
    assert key_of([1, {"a": None}]) == key_of([1, {"a": None}])


def test_read() -> None:
    assert read({"a": 1}, "a") == 1
    assert read(Asked(torch.get_default_dtype), "the default dtype") == torch.float32


def test_numbers_of_optimizers() -> None:
    assert [is_number(each) for each in (0.1, True, torch.tensor(0.1))] == [True, False, False]
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=0.1)
    assert numbers_of(Optimizers((optimizer,)))[0, "betas[1]"] == 0.999
    group = with_numbers({"lr": 1.0, "betas": (0.9, 0.99)}, {"betas[0]": 0.5})
    assert group == {"lr": 1.0, "betas": (0.5, 0.99)}


def test_several_optimizers_have_one_list_of_groups() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    both = Optimizers((torch.optim.SGD([first]), torch.optim.Adam([second], betas=(0.8, 0.9))))
    assert (both.name, both.group_name(1)) == ("SGD and Adam", "group 0 of Adam")
    assert both.groups[1][1]["betas"] == (0.8, 0.9)
