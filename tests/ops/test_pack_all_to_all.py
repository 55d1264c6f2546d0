"""Packing and unpacking on one process: pieces by rank, any dtype and row shape, fresh outputs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from graphpasses.ops.pack_all_to_all import PACK, PACK_POOLED_EMBEDDINGS, UNPACK, packed_dtype
from tests.helpers.models import same_bits


def members() -> tuple[list[Tensor], list[int]]:
    """Tensors of many kinds, and the rows of each that are for rank 0 and for rank 1."""
    torch.manual_seed(0)
    tensors = [
        (torch.arange(7), [3, 4]),
        (torch.randn(5, 3), [5, 0]),
        (torch.randn(4, 2, 2).transpose(1, 2), [1, 3]),  # not contiguous
        (torch.randn(3).bfloat16(), [0, 3]),
        (torch.tensor([True, False]), [1, 1]),
        (torch.randn(0, 4, dtype=torch.float64), [0, 0]),
        (torch.randn(5, 0), [2, 3]),
        (torch.full((6,), float("nan")), [3, 3]),
        (torch.randn(2, dtype=torch.complex64), [2, 0]),
        (torch.tensor([3], dtype=torch.uint8), [0, 1]),
    ]
    return [tensor for tensor, _ in tensors], [rows for _, splits in tensors for rows in splits]


def unpack(packed: Tensor, splits: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    shapes = [tensor.shape[1:] for tensor in tensors]
    sizes = [size for shape in shapes for size in shape]
    return UNPACK(packed, splits, sizes, [len(shape) for shape in shapes], [t.dtype for t in tensors])


def test_pieces_lie_by_rank() -> None:
    a, b = torch.arange(5), torch.arange(10, 16).view(3, 2)
    packed = PACK([a, b], [2, 3, 1, 2])
    assert packed.tolist() == [0, 1, 10, 11, 2, 3, 4, 12, 13, 14, 15]


def test_mixed_dtypes_lie_as_bytes() -> None:
    a, b = torch.arange(5), torch.arange(6.0).view(3, 2)
    packed = PACK([a, b], [2, 3, 1, 2])
    assert packed.dtype == packed_dtype([a.dtype, b.dtype]) == torch.uint8
    parts = [a[:2], b[:1].flatten(), a[2:], b[1:].flatten()]
    assert torch.equal(packed, torch.cat([part.view(torch.uint8) for part in parts]))


@pytest.mark.parametrize("kinds", [slice(0, 1), slice(1, 3), slice(6, 8), slice(None)])
def test_unpacking_undoes_packing(kinds: slice) -> None:
    tensors, splits = members()
    splits = [size for pair in list(zip(splits[::2], splits[1::2], strict=True))[kinds] for size in pair]
    tensors = tensors[kinds]
    packed = PACK(tensors, splits)
    outputs = unpack(packed, splits, tensors)
    assert all(map(same_bits, outputs, tensors))
    for output in outputs:
        assert output.is_contiguous()
        assert output.storage_offset() == 0
        assert output.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr() or not output.numel()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_number_of_ranks(num_ranks: int) -> None:
    tensors = [torch.arange(2 * num_ranks), torch.arange(num_ranks) + 100]
    splits = [2] * num_ranks + [1] * num_ranks
    packed = PACK(tensors, splits)
    assert packed.view(num_ranks, 3)[:, 2].tolist() == tensors[1].tolist()
    assert all(map(same_bits, unpack(packed, splits, tensors), tensors))


def test_splits_must_fit() -> None:
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        PACK([torch.arange(5)], [2, 2])


def test_they_are_proper_operators() -> None:
    tensors, splits = members()
    assert set(torch.library.opcheck(PACK, (tensors[:9], splits[:18])).values()) == {"SUCCESS"}
    arguments = (PACK(tensors[:2], splits[:4]), splits[:4], [3], [0, 1], [torch.int64, torch.float32])
    # opcheck's test of the schema cannot take lists of dtypes.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(UNPACK, arguments, test_utils=checks).values()) == {"SUCCESS"}


def test_sizes_that_data_decides() -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        rows = [environment.create_unbacked_symint() for _ in range(2)]
        total = rows[0] + rows[1]
        packed = PACK([torch.empty(total, dtype=torch.int64), torch.empty(total, 3)], [*rows, *rows])
        assert str(packed.shape[0]) == "20*u0 + 20*u1"
        one, two = UNPACK(packed, [*rows, *rows], [3], [0, 1], [torch.int64, torch.float32])
    assert (str(one.shape), str(two.shape)) == ("torch.Size([u0 + u1])", "torch.Size([u0 + u1, 3])")
    assert not environment.guards
    assert len(free_unbacked_symbols(two)) == 2


def test_pieces_of_each_rank_lie_side_by_side() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2).t()  # not contiguous
    packed = PACK_POOLED_EMBEDDINGS([a[:, :1], b, a[:, 1:]], [2, 1])
    assert packed.tolist() == [0, 10, 12, 3, 11, 13, 1, 2, 4, 5]


def test_a_rank_without_pieces() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2)
    assert PACK_POOLED_EMBEDDINGS([a, b], [0, 2]).tolist() == torch.cat([a, b], 1).view(-1).tolist()


def test_opcheck_of_pieces() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2)
    torch.library.opcheck(PACK_POOLED_EMBEDDINGS, ([a[:, :1], b, a[:, 1:]], [2, 1]))
