"""What a step need not look at again: nothing was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.state.model import Unwritten
from graphpasses.state.slots import Owner


class Config:
    scale = 2.0
    sizes = (2, (3, 4))

    def scaled(self, value: float) -> float:
        return self.scale * value


def model_and_config() -> tuple[nn.Module, Config]:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)), Config()


def owners_of(model: nn.Module, config: Config) -> tuple[Owner, ...]:
    owners = Owner(model[2]), Owner(config)
    owners[0].add("p")
    for name in ("scale", "sizes", "scaled"):
        owners[1].add(name)
    return owners


def seen(model: nn.Module) -> Unwritten:
    found = Unwritten.of(model)
    assert found is not None
    return found


def state_replaced(model: nn.Module, config: Config) -> None:
    model[0].__dict__ = {**vars(model[0])}


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "attribute": lambda model, config: setattr(model[2], "p", 0.2),
    "attribute of an object": lambda model, config: setattr(config, "scale", 3.0),
    "tuple": lambda model, config: setattr(config, "sizes", (2, (3, 5))),
    "method": lambda model, config: setattr(config, "scaled", abs),
    "new attribute": lambda model, config: setattr(model[0], "new", 1),
    "mode": lambda model, config: model[2].eval(),
    "module": lambda model, config: model.__setitem__(2, nn.Dropout(0.1)),
    "new module": lambda model, config: model[0].add_module("new", nn.Identity()),
    "parameter": lambda model, config: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "buffer": lambda model, config: model[0].register_buffer("new", torch.ones(2)),
    "dtype": lambda model, config: model[0].double(),
    "shape": lambda model, config: setattr(model[0].weight, "data", torch.ones(3, 2)),
    "requires_grad": lambda model, config: model[0].weight.requires_grad_(False),
    "hook": lambda model, config: model[0].register_forward_hook(print),
    "hook of backward": lambda model, config: model[0].register_full_backward_hook(print),
    "hook of a gradient": lambda model, config: model[0].weight.register_hook(print),
    "hook after a gradient": lambda model, config: model[0].weight.register_post_accumulate_grad_hook(print),
    "attribute of a parameter": lambda model, config: setattr(model[0].weight, "new", 1),
    "class": lambda model, config: setattr(model[2], "__class__", nn.Identity),
    "state": state_replaced,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=[*WRITES])
def test_a_write_is_seen(write: Callable[[Any, Any], object]) -> None:
    model, config = model_and_config()
    before, owners = seen(model), owners_of(model, config)
    assert before.tensors(model) is not None
    assert not any(owner.difference() for owner in owners)
    write(model, config)
    assert before.tensors(model) is None or any(owner.difference() for owner in owners)


@pytest.mark.parametrize("name", ["scale", "scaled"])
def test_an_attribute_of_a_class(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owners = owners_of(*model_and_config())
    monkeypatch.setattr(Config, name, abs)
    assert any(owner.difference() for owner in owners)


def test_what_a_step_writes_is_none() -> None:
    model, _ = model_and_config()
    before = seen(model)
    model(torch.ones(3, 2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    model.train().zero_grad()
    expected = [each for module in model for each in (*module.parameters(), *module.buffers())]
    assert list(map(id, before.tensors(model) or ())) == list(map(id, expected))
    assert before.tensors(model[:2]) is None


class Indirect:
    def __init__(self) -> None:
        self.items, self.scale, self.pair, self.of_another = [1.0], 2.0, ([1.0], 2.0), Config().scaled

    @property
    def first(self) -> float:
        return self.items[0]

    def change(self) -> None:
        self.items[0] = self.pair[0][0] = self.missing = 3.0
        self.of_another = Config().scaled


@pytest.mark.parametrize("name", ["items", "first", "missing", "pair", "of_another"])
def test_what_no_dict_says_is_asked_each_time(name: str) -> None:
    value = Indirect()
    owner = Owner(value)
    owner.add("scale")
    owner.add(name)
    assert owner.difference() is None
    value.change()
    assert owner.difference() is not None


def test_tensors_that_torch_has_no_guard_for() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.eye(2).to_sparse_coo())
    assert Unwritten.of(model) is None
