"""Sums of a pipeline stage's gradients over microbatches, rounded as FSDP2 rounds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class MicrobatchSums:
    """A stage's gradients of microbatches, added when and in the dtype in which FSDP2 adds them.

    What a backward call yields is added in the dtype of compute, as autograd does, until the next call that runs
    FSDP2's ``post_backward``: that adds it to the sum in the dtype of the reduction. With one backward call for
    inputs and weights it is that call; else it is the one for the *inputs* of the next microbatch, so that weights'
    gradients of several microbatches may first add up in the dtype of compute. Source: FSDP2's ``_fsdp_param.py``,
    ``to_accumulated_grad_if_needed`` and ``accumulate_unsharded_grad_if_needed``; torch's
    ``pipelining/_backward.py``, ``stage_backward_weight``.
    """

    def __init__(self) -> None:
        self._added: dict[int, Any] = {}
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forgets what a step that failed has left."""
        self._added.clear()
        self._kept.clear()

    def add(self, gradients: list[Any]) -> None:
        """Adds the gradients of a microbatch, by output, in their dtype; what is no tensor is kept."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if isinstance(gradient, Tensor) and index in self._added:
                self._added[index] = self._added[index] + gradient  # others may hold what a graph returned
            else:
                self._added[index] = gradient

    def post_backward(self, dtypes: dict[int, Any]) -> None:
        """Adds what was added to the sums in other dtypes, by output."""
        for index, dtype in dtypes.items():
            gradient = self._added.get(index)
            if gradient is None:
                continue
            if index in self._kept:
                self._kept[index] += self._added.pop(index)
            elif gradient.dtype != dtype:
                self._kept[index] = self._added.pop(index).to(dtype)

    def take(self, indices: Iterable[int]) -> list[Any]:
        """Returns the sums of outputs, and forgets them."""
        return [
            self._kept.pop(index, None) if index in self._kept else self._added.pop(index, None) for index in indices
        ]
