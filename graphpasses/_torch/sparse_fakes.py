"""Sparse tensors without values that have as many elements as the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._mode_utils import no_dispatch


def num_elements(tensor: torch.Tensor) -> int | None:
    """Returns how many elements a sparse tensor has, which are coordinates and values; None of another."""
    if tensor.layout is not torch.sparse_coo:
        return None
    with no_dispatch():  # a fake mode would make it a fake one, which may have none
        return tensor._nnz()


@contextmanager
def elements_counted() -> Iterator[None]:
    """Lets sparse tensors that become fake ones in the block keep their number of elements, of which torch leaves
    none: code asks for it, as to draw which of them are dropped.
    """
    converted = FakeTensorConverter.from_real_tensor

    def from_real_tensor(
        self: FakeTensorConverter, fake_mode: FakeTensorMode, t: torch.Tensor, *args: Any, **options: Any
    ) -> FakeTensor:
        is_known = self._get_memo(t) is not None
        fake = converted(self, fake_mode, t, *args, **options)
        if is_known or t.layout is not torch.sparse_coo or t.requires_grad:
            return fake
        with no_dispatch():
            parts = t._indices(), t._values()
        with fake_mode:
            of_elements: FakeTensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
                t.sparse_dim(),
                t.dense_dim(),
                t.shape,
                *(converted(self, fake_mode, part) for part in parts),
                dtype=t.dtype,
                layout=t.layout,
                device=t.device,
                is_coalesced=t.is_coalesced(),
            )
        self.set_tensor_memo(t, of_elements)
        return of_elements

    with mock.patch.object(FakeTensorConverter, "from_real_tensor", from_real_tensor):
        yield
