"""Steps are counted by backward, not by forward."""

from __future__ import annotations

import torch

from graphpasses.ops.count_steps import count_steps


def test_each_backward_counts_once() -> None:
    trigger, steps = torch.empty(0, requires_grad=True), torch.zeros(3)
    for step in range(1, 3):
        counted = count_steps(trigger, steps, torch.tensor([0, 2]))
        assert steps.tolist() == [step - 1, 0, step - 1]
        counted.sum().backward()
        assert steps.tolist() == [step, 0, step]
