"""Aliases share memory and gradients; steps are counted by backward, not by forward."""

from __future__ import annotations

import torch

from graphpasses.ops.autograd_functions import alias_tensors, count_steps


def test_aliases_share_memory_and_gradients() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    left, right = alias_tensors(*tensors)
    assert not left._is_view()
    assert right.data_ptr() == tensors[1].data_ptr()
    assert left.grad_fn is right.grad_fn
    (3 * left).sum().backward()
    assert torch.equal(tensors[0].grad, torch.full((2,), 3.0))
    assert tensors[1].grad is None


def test_each_backward_counts_once() -> None:
    trigger, steps = torch.empty(0, requires_grad=True), torch.zeros(3)
    for step in range(1, 3):
        counted = count_steps(trigger, steps, torch.tensor([0, 2]))
        assert steps.tolist() == [step - 1, 0, step - 1]
        counted.sum().backward()
        assert steps.tolist() == [step, 0, step]
