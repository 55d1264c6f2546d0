"""What a step need not look at again: nothing was written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.state.slots import Owner
from graphpasses.state.unwritten import Unwritten


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


def seen(model: nn.Module, owners: Iterable[Owner] = ()) -> Unwritten:
    found = Unwritten.of(model, owners)
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
    before = seen(model, owners_of(model, config))
    assert before.tensors(model) is not None
    assert not any(owner.difference() for owner in before.owners)
    write(model, config)
    assert before.tensors(model) is None or any(owner.difference() for owner in before.owners)


@pytest.mark.parametrize("name", ["scale", "scaled"])
def test_an_attribute_of_a_class(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owners = owners_of(*model_and_config())
    monkeypatch.setattr(Config, name, abs)
    assert any(owner.difference() for owner in owners)


class Scaled(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.power, self.sizes, self.pair = 1, [2, 3], (2, 3)

    @property
    def first(self) -> int:
        return self.sizes[0]

    def scaled(self, value: float) -> float:
        return self.scale * value

    @staticmethod
    def twice(value: float) -> float:
        return 2 * value


BY_THEMSELVES = ("power", "pair", "scale", "scaled")  # where dict and class are as they were, so are these


def scaled_and_seen() -> tuple[Scaled, Unwritten]:
    model = Scaled()
    owner = Owner(model, "model")
    for name in (*BY_THEMSELVES, "sizes", "first", "twice", "absent"):
        owner.add(name)
    return model, seen(model, [owner])


def test_what_dicts_and_classes_say_is_not_asked_again() -> None:
    model, before = scaled_and_seen()
    assert before.tensors(model) is not None
    asked = {owner.path: [*owner.slots] for owner in before.owners}
    assert asked == {"model": ["sizes", "first", "twice", "absent"]}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_what_is_not_asked_again_is_written(name: str) -> None:
    model, before = scaled_and_seen()
    setattr(model, name, abs)
    assert before.tensors(model) is None


@pytest.mark.parametrize("name", ["scale", "scaled"])
def test_what_stands_in_a_class_is_written(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, before = scaled_and_seen()
    monkeypatch.setattr(Scaled, name, abs)
    assert before.tensors(model) is None


def test_a_class_gets_what_hides_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = scaled_and_seen()
    monkeypatch.setattr(Scaled, "power", property(lambda module: 3), raising=False)
    assert model.power == 3
    assert before.tensors(model) is None


def test_a_class_that_answers_itself_is_asked_each_time() -> None:
    class Answering(Scaled):
        def __getattribute__(self, name: str) -> object:
            return super().__getattribute__(name)

    owner = Owner(model := Answering())
    owner.add("power")
    assert [[*each.slots] for each in seen(model, [owner]).owners] == [["power"]]


def test_what_a_step_writes_is_none() -> None:
    model, _ = model_and_config()
    before = seen(model)
    model(torch.ones(3, 2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    model.zero_grad()
    if sys.version_info < (3, 13):  # since then Python takes writing what is there for a write
        model.train()
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
