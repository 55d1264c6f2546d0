"""Schedules of hyperparameters, and optimizers that they change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

__all__ = ["MAKERS", "NUM_STEPS", "SCHEDULES", "WeightDecay"]

NUM_STEPS = 16  # cycles go up for seven, and down for seven


class WeightDecay(LRScheduler):
    """Lets weight decay, eps and learning rates fall, as users' own schedulers do."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            for name in {"weight_decay", "eps"} & group.keys():
                group[name] *= 0.97
        return [group["lr"] * 0.99 for group in self.optimizer.param_groups]


def cosine_with_warm_up(optimizer: Optimizer) -> LRScheduler:
    warm_up = LinearLR(optimizer, 0.1, total_iters=5)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, NUM_STEPS - 5)], [5])


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "one_cycle": partial(OneCycleLR, max_lr=0.1, total_steps=NUM_STEPS + 1),
    "cyclic": partial(CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=7),
    "lambda": partial(LambdaLR, lr_lambda=lambda index: index / (1 + index)),  # begins at 0
    "cosine": cosine_with_warm_up,
    "weight_decay": WeightDecay,
}
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9, weight_decay=0.1, foreach=True),
    "adam": partial(Adam, foreach=True),
    "adamw": partial(AdamW, foreach=False),
}
