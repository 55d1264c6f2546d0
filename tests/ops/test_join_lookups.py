"""The operators around a fused lookup."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphpasses.errors import IdError
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES

IDS = [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2])]
NAMES = ["users", "items"]


def offsets(*values: list[int]) -> list[Tensor]:
    return list(map(torch.tensor, values))


def test_bags_are_joined() -> None:
    ids, lengths = JOIN_BAGS(IDS, offsets([0, 1, 3, 3, 4], [0, 2, 2]), [2, 1], NAMES)
    assert ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert lengths.tolist() == [[1, 2], [0, 1], [2, 0]]


def test_smaller_batches_get_empty_bags() -> None:
    _, lengths = JOIN_BAGS(IDS, offsets([0, 1, 3, 3, 4], [0, 2]), [2, 1], NAMES)
    assert lengths.tolist() == [[1, 2], [0, 1], [2, 0]]
    ids, lengths = JOIN_BAGS([IDS[0], IDS[1][:0]], offsets([0, 1, 3, 3, 4], [0]), [2, 1], NAMES)
    assert lengths.tolist() == [[1, 2], [0, 1], [0, 0]]
    ids, lengths = JOIN_BAGS([IDS[0][:0]] * 2, offsets([0], [0]), [2, 1], NAMES)
    assert (ids.shape, lengths.shape) == ((0,), (3, 0))


@pytest.mark.parametrize("wrong", [[1, 2, 2], [0, 1, 1]])
def test_ids_outside_of_bags_are_refused(wrong: list[int]) -> None:
    with pytest.raises(IdError, match=r"^items was called with offsets .* disable the pass 'fuse-tbe'$"):
        JOIN_BAGS(IDS, offsets([0, 1, 3, 3, 4], wrong), [2, 1], NAMES)


def test_outputs_are_split() -> None:
    pooled = torch.randn(2, 6, requires_grad=True)
    left, right = SPLIT_FEATURES(pooled, [4, 2], [2, 1])
    assert torch.equal(left, pooled[:, :4])
    assert torch.equal(right, pooled[:1, 4:])
    assert left.is_contiguous()
    assert left.untyped_storage().nbytes() == 32
    (left * 2).sum().backward()
    assert pooled.grad is not None
    assert pooled.grad.tolist() == [[2.0] * 4 + [0.0] * 2] * 2


# From torch 2.15 on opcheck itself reads a gradient that is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("batch_size", [1, 2])
def test_operators_are_proper(batch_size: int) -> None:
    pooled = torch.randn(2, 6, requires_grad=True)
    torch.library.opcheck(SPLIT_FEATURES, (pooled, [4, 2], [2, batch_size]))
    torch.library.opcheck(JOIN_BAGS, (IDS, offsets([0, 1, 3, 3, 4], [0, 2, 2]), [2, 1], NAMES))
