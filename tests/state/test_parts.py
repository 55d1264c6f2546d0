"""Lists, tuples and dicts of tensors in an optimizer's state are followed as tensors there are."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from graphpasses.state.parts import part_in, parts_of, put_part, whole
from tests.capture.test_update import X, build, capture, eagerly, equal_weights

A, B = torch.zeros(1), torch.ones(1)


def test_parts_make_what_they_are_of() -> None:
    values = {"a": [A, {"b": (B, 2), 0.5: []}, None], "shape": (1, 2), "n": 3, "last": {"x": A}}
    parts = parts_of(values)
    assert [*parts] == ["a[0]", "a[1]['b'][0]", "a[1]['b'][1]", "a[1][0.5]", "a[2]", "shape", "n", "last['x']"]
    assert whole(parts) == values
    assert whole(parts)["a"] is not values["a"]
    assert parts_of(plain := {"n": 3, "mean": A}) is plain


def test_a_part_becomes_another() -> None:
    values: dict[str, Any] = {"a": [A, (A, A)]}
    parts = parts_of(values)
    for name in parts:
        assert part_in(values, name) is A
    *_, last = parts
    for each in (values, parts):
        put_part(each, last, B)
    assert values["a"] == [A, (A, B)] == whole(parts)["a"]


class Factored(Optimizer):
    """Keeps a moment for each dim, which are written, others, which are replaced, and a count, all in containers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, squares = self.state[parameter], parameter.grad.square()
                if not state:
                    state["sums"] = [squares.sum(dim) * 0 for dim in range(squares.dim())]
                    state["others"] = {"last": (torch.zeros_like(parameter), 0)}
                for dim, each in enumerate(state["sums"]):
                    each.mul_(0.9).add_(squares.sum(dim))
                last, count = state["others"]["last"]
                state["others"]["last"] = last / 2 + parameter.grad, count + 1
                parameter.sub_(last / sum(each.mean() for each in state["sums"]) / (count + 1), alpha=group["lr"])


def test_containers_are_followed() -> None:
    models = build(), build()
    optimizers = [Factored(model.parameters(), {"lr": 0.1}) for model in models]
    step = capture(models[1], optimizers[1])
    for _ in range(4):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
        assert equal_weights(*models)
    assert len(step.captures) == 1
    states = [each.state[model[0].weight] for each, model in zip(optimizers, models, strict=True)]
    assert [state["others"]["last"][1] for state in states] == [4, 4]
    for one, other in zip(*(state["sums"] + [state["others"]["last"][0]] for state in states), strict=True):
        assert torch.equal(one, other)
