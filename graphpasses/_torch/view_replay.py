"""How autograd differentiates a view whose memory was written."""

from __future__ import annotations

from contextlib import AbstractContextManager

# Tested: 2.13.
from torch.autograd.grad_mode import _force_original_view_tracking

__all__ = ["views_replayed"]


def views_replayed() -> AbstractContextManager[None]:
    """Lets autograd make views of real tensors again by the calls that made them, as it does for fake ones.

    Otherwise it makes them again by their strides, and their gradients are copied by other operators.

    Example:
        >>> weight = torch.ones(2, 3, requires_grad=True)
        >>> with views_replayed():
        ...     weight.mul(3)[0].mul_(2).sum().backward()
        >>> weight.grad
        tensor([[6., 6., 6.],
                [0., 0., 0.]])
    """
    replayed: AbstractContextManager[None] = _force_original_view_tracking(True)
    return replayed
