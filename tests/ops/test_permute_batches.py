"""Permutations of batches against the two that TorchRec's eager calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Case  # loads TorchRec without its warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.distributed import dist_data

from graphpasses.ops.permute_batches import PERMUTE_BATCHES, permute_batches, permute_sequences

del Case
NUM_FEATURES = 3
EQUAL, UNEQUAL = [2, 2, 2, 2], [3, 0, 1, 2]


def received(batch_sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (NUM_FEATURES * sum(batch_sizes),), generator=generator)
    num_ids = int(lengths.sum())
    return lengths, torch.arange(num_ids), torch.rand(num_ids, generator=generator)


@pytest.mark.parametrize("batch_sizes", [EQUAL, UNEQUAL, [0, 0, 0, 0]])
@pytest.mark.parametrize("stagger", [1, 2])
@pytest.mark.parametrize("num_tensors", [2, 3])
def test_batches_are_permuted_as_in_eager(batch_sizes: list[int], stagger: int, num_tensors: int) -> None:
    tensors = list(received(batch_sizes)[:num_tensors])
    eager = KeyedJaggedTensor.dist_init(
        keys=[f"f{index}" for index in range(NUM_FEATURES)],
        tensors=tensors,
        variable_stride_per_key=False,
        num_workers=4,
        recat=dist_data._get_recat(NUM_FEATURES, 4, stagger, batch_size_per_rank=batch_sizes),
        stride_per_rank=batch_sizes,
    )
    permute = dist_data._get_recat(NUM_FEATURES, 4, stagger)
    permuted = permute_batches(tensors, permute, batch_sizes)
    expected = [eager.lengths(), eager.values(), eager.weights_or_none()][:num_tensors]
    assert all(torch.equal(*pair) for pair in zip(permuted, expected, strict=True))
    restored = permute_batches(permuted, permute, batch_sizes, is_inverse=True)
    assert all(torch.equal(*pair) for pair in zip(restored, tensors, strict=True))


@pytest.mark.parametrize("batch_sizes", [EQUAL, UNEQUAL])
def test_gradients_are_permuted_back(batch_sizes: list[int]) -> None:
    lengths, values, _ = received(batch_sizes)
    permute = dist_data._get_recat(NUM_FEATURES, 4)
    permuted_lengths, rows = permute_batches([lengths, values], permute, batch_sizes)
    embeddings = torch.rand(len(values), 2, requires_grad=True)
    output = permute_sequences(embeddings, permuted_lengths, permute, batch_sizes)
    # Row i went to where `rows` holds i, and comes back.
    assert torch.equal(output[rows], embeddings)
    gradient = torch.rand_like(output)
    output.backward(gradient)
    assert torch.equal(embeddings.grad, gradient[rows])


@pytest.mark.parametrize("batch_sizes", [EQUAL, UNEQUAL])
def test_operator_is_registered_whole(batch_sizes: list[int]) -> None:
    permute = dist_data._get_recat(NUM_FEATURES, 4)
    arguments = (list(received(batch_sizes)), permute, batch_sizes, False)
    torch.library.opcheck(PERMUTE_BATCHES, arguments)
