"""Lists to which a step appends what it computes, as metrics of each step: it does so, and must not read them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpasses as gp
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits


class Model(nn.Module):
    """Keeps, in some way, what it computes."""

    def __init__(self, keep: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.losses: list[Any] = []
        self.metrics: dict[str, Any] = {"train": {"loss": [0.5]}, "eval": defaultdict(list)}
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        kept = self.keep(self, loss)
        return loss if kept is None else loss * kept


LOG: list[Any] = []


def trained(model: Model, call: Callable[[Tensor], Tensor], *, between: Callable[[Model, int], None]) -> list[Any]:
    """Returns what is kept after some steps, with the losses."""
    LOG.clear()
    losses = []
    for step in range(4):
        model.zero_grad()
        losses.append(call(torch.full((2, 3), step - 1.5)).detach())
        between(model, step)
    return [losses, [*model.losses], copy.deepcopy(model.metrics), [*LOG]]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and same_bits(one.detach(), other)
    if isinstance(one, dict):
        return type(one) is type(other) and alike([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return type(one) is type(other) and len(one) == len(other) and all(alike(*pair) for pair in pairs)
    return type(one) is type(other) and one == other


def nothing(model: Model, step: int) -> None:
    pass


def emptied(model: Model, step: int) -> None:
    """As at the end of an epoch."""
    if step == 1:
        model.losses.clear()
        model.losses = []
        model.metrics["train"]["loss"] = [3.0, 4.0]
        LOG.clear()


def with_a_hook(model: Model, loss: Tensor) -> None:
    model.losses.clear()
    model.losses.append(loss.detach() * 2)


KEEPS: dict[str, Callable[[Model, Tensor], Any]] = {
    "numbers": lambda model, loss: model.losses.append(loss.item()),
    "tensors": lambda model, loss: model.losses.append(loss.detach()),
    "with its history": lambda model, loss: model.losses.append(loss),
    "several": lambda model, loss: model.losses.extend([loss.item(), ("twice", 2 * loss.detach())]),
    "dicts": lambda model, loss: model.losses.append({"loss": loss.item(), "name": "train"}),
    "behind others": lambda model, loss: model.metrics["train"]["loss"].append(loss.item()),
    "in a new list": lambda model, loss: model.metrics["eval"]["loss"].append(loss.item()),
    "outside": lambda model, loss: LOG.append(loss.item()),
    "emptied by itself": with_a_hook,
    "set": lambda model, loss: model.losses.__setitem__(slice(None), [loss.item()]),
}


@pytest.mark.parametrize("between", [nothing, emptied])
@pytest.mark.parametrize("name", KEEPS)
def test_a_step_appends_what_eager_appends(name: str, between: Callable[[Model, int], None]) -> None:
    torch.manual_seed(0)
    eager = Model(KEEPS[name])
    model = copy.deepcopy(eager)

    def call(x: Tensor) -> Tensor:
        loss: Tensor = eager(x)
        loss.backward()
        return loss

    step = gp.capture_train_step(lambda model, x: model(x), model, torch.ones(2, 3))
    expected, found = trained(eager, call, between=between), trained(model, step, between=between)
    assert alike(expected, found), (expected, found)
    step.check(torch.ones(2, 3))
    with torch.no_grad():
        model.linear.bias += 1.0
    assert not alike(expected, trained(model, step, between=emptied))  # control


READS: dict[str, Callable[[list[Any]], Any]] = {
    "length": len,
    "truth": lambda losses: 2.0 if losses else 1.0,
    "item": lambda losses: losses[0],
    "last": lambda losses: losses[-1],
    "part": lambda losses: len(losses[:2]),
    "loop": lambda losses: max([1.0, *losses]),
    "sum": sum,
    "sorted": lambda losses: len(sorted(losses)),
    "in another order": lambda losses: losses.sort(key=lambda each: 1.0, reverse=True),
    "search": lambda losses: 2.0 if 0.25 in losses else 1.0,
    "concatenated": lambda losses: len(losses + losses),
    "copied": lambda losses: len(losses.copy()),
    "tuple": lambda losses: len(tuple(losses)),
    "stacked": lambda losses: torch.stack([torch.as_tensor(each) for each in losses]).mean(),
    "text": lambda losses: float(len(str(losses))),
    "taken": lambda losses: losses.pop(0),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_list_that_is_read_is_refused(name: str, is_before: bool) -> None:
    def keep(model: Model, loss: Tensor) -> Any:
        model.losses.append(loss.item()) if is_before else None
        found = READS[name](model.losses) if model.losses is not None else None
        model.losses.append(loss.item()) if not is_before else None
        return found

    model = Model(keep)
    model.losses.append(0.5)
    with pytest.raises(CaptureError, match=r"'losses'|makes the text of a number|decides by a tensor's value"):
        gp.capture_train_step(lambda model, x: model(x), model, torch.ones(2, 3))
    assert model.losses == [0.5]


def test_a_list_with_another_name_that_is_read_is_refused() -> None:
    def keep(model: Model, loss: Tensor) -> Any:
        model.metrics["train"]["loss"].append(loss.item())
        return float(len(model.losses))

    model = Model(keep)
    model.losses = model.metrics["train"]["loss"]
    with pytest.raises(CaptureError, match=r"'(metrics|losses)'"):
        gp.capture_train_step(lambda model, x: model(x), model, torch.ones(2, 3))
