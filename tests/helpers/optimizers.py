"""Optimizers as people write them: with counts in Python, and decisions by these."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["FOLLOWED", "Counting"]

Rate = Callable[[dict[str, Any], int], float]


class Kind(enum.IntEnum):
    """A kind of normalization, which has a number."""

    NONE = 0
    SIGN = 2


class Counting(Optimizer):
    """Momentum with a correction of its bias, as of Adam's first moment, by a count of its steps.

    Args:
        parameters: what it updates.
        lr: the learning rate.
        rate: returns the rate of a step, of its group and the count.
        in_group: whether the count is its group's, which its first step makes.
        replaces: whether each step makes another tensor of the momentum.
        kind: how it normalizes.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 0.1,
        rate: Rate = lambda group, count: group["lr"] / (1 - group["beta"] ** count),
        *,
        in_group: bool = False,
        replaces: bool = False,
        kind: Kind = Kind.NONE,
    ) -> None:
        self.rate, self.in_group, self.replaces = rate, in_group, replaces
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "every": 3, "sum": 0.0, "most": -1.0, "kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.in_group:
                group["count"] = group.get("count", 0) + 1
            group["most"] = max(group["lr"], group["most"])
            group["sum"] += group["most"] ** 2
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["mean"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                if self.replaces:
                    state["mean"] = state["mean"] * group["beta"] + parameter.grad * (1 - group["beta"])
                else:
                    state["mean"].mul_(group["beta"]).add_(parameter.grad, alpha=1 - group["beta"])
                count = group["count"] if self.in_group else state["count"]
                mean = state["mean"].sign() if group["kind"] == Kind.SIGN else state["mean"]
                parameter.mul_(1 - 0.1 * group["lr"])
                parameter.add_(mean, alpha=-self.rate(group, count))


def rooted(group: dict[str, Any], count: int) -> float:
    warm = math.sqrt(1 - 0.99**count) * (1 - math.exp(-count))
    return float_free(group["lr"] * warm) / (1 - group["beta"] ** count)


def float_free(value: float) -> float:
    return value / math.pow(2.0, 0.5)


def warmed(group: dict[str, Any], count: int) -> float:
    weight = group["most"] ** 2 / group["sum"]
    return group["lr"] * min(1.0, count / 4) * weight


def every(group: dict[str, Any], count: int) -> float:
    return group["lr"] * 2 if count % group["every"] == 0 else group["lr"]


def rectified(group: dict[str, Any], count: int) -> float:
    """As RAdam's, which takes other steps until its variance is tractable."""
    beta = 0.9
    most = 2 / (1 - beta) - 1
    rho = most - 2 * count * beta**count / (1 - beta**count)
    if rho > 5:
        return group["lr"] * math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    return group["lr"]


# By name, how it is made, and how many captures it takes in eight steps: one for each way to go.
FOLLOWED: dict[str, tuple[Callable[..., Optimizer], int]] = {
    "in_state": (Counting, 1),
    "in_group": (partial(Counting, in_group=True), 1),
    "rooted": (partial(Counting, rate=rooted), 1),
    "warmed": (partial(Counting, rate=warmed, in_group=True), 1),
    "every": (partial(Counting, rate=every), 2),
    "rectified": (partial(Counting, rate=rectified), 2),
    "replaces": (partial(Counting, replaces=True), 1),
    "kind": (partial(Counting, kind=Kind.SIGN), 1),
}
