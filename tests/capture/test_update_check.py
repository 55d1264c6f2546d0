"""An optimizer's own step and the captured update are compared in all that they keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from tests.capture.test_update import X, build, capture, eagerly, equal_weights


class Constant(Optimizer):
    """Makes a number in its first step, and keeps it, as AdaBelief's ``rho_inf``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = self.state[parameter].setdefault("rate", group["lr"] / 3)
                parameter.sub_(parameter.grad, alpha=rate)


def test_a_number_that_stays_is_read() -> None:
    models = build(), build()
    optimizers = [Constant(model.parameters(), {"lr": 0.1}) for model in models]
    step = capture(models[1], optimizers[1])
    for index in range(4):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
        assert equal_weights(*models)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 9.0  # which only a first step reads
            for state in optimizer.state.values():
                assert state["rate"] == 0.1 / 3 + max(0, index - 1) * 0.01
                state["rate"] = 0.1 / 3 + index * 0.01
