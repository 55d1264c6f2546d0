from __future__ import annotations

import torch

from graphpasses.ops.alias_tensors import alias_tensors


def test_aliases_share_memory_and_gradients() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    left, right = alias_tensors(*tensors)
    assert not left._is_view()
    assert right.data_ptr() == tensors[1].data_ptr()
    assert left.grad_fn is right.grad_fn
    (3 * left).sum().backward()
    assert torch.equal(tensors[0].grad, torch.full((2,), 3.0))
    assert tensors[1].grad is None
