"""Batches of TorchRec's jagged and keyed tensors: one capture serves varying numbers of ids and of samples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from tests.capture.test_dynamic_shapes import Net, train
from tests.helpers.models import same_bits

torchrec = pytest.importorskip("torchrec")
KEYS = ["a", "b", "c"]


class Recommender(nn.Module):
    """Tables of three keys, one read by two of them, one averaged; and dense features."""

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        pooling = torchrec.PoolingType
        tables = [("t", ["a", "b"], pooling.SUM), ("u", ["c"], pooling.SUM if is_weighted else pooling.MEAN)]
        self.tables = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=4, num_embeddings=20, feature_names=keys, pooling=kind
                )
                for name, keys, kind in tables
            ],
            is_weighted=is_weighted,
        )
        self.dense, self.over = nn.Linear(5, 4), nn.Linear(16, 1)

    def forward(self, dense: torch.Tensor, features: Any) -> torch.Tensor:
        pooled = self.tables(features).values()
        return self.over(torch.cat([self.dense(dense), pooled], 1)).squeeze(1)


@dataclasses.dataclass
class Samples:
    dense: torch.Tensor
    features: Any
    label: torch.Tensor


def log_loss(model: nn.Module, samples: Samples) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(samples.dense, samples.features), samples.label)


def features(num_samples: int, *, is_weighted: bool = False, by_offsets: bool = False, max_length: int = 5) -> Any:
    generator = torch.Generator().manual_seed(num_samples)
    lengths = torch.randint(0, max_length, (len(KEYS) * num_samples,), generator=generator)
    num_ids = int(lengths.sum())
    values = torch.randint(0, 20, (num_ids,), generator=generator)
    weights = torch.rand(num_ids, generator=generator) if is_weighted else None
    if by_offsets:
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        return torchrec.KeyedJaggedTensor(KEYS, values, weights, offsets=offsets)
    return torchrec.KeyedJaggedTensor(KEYS, values, weights, lengths=lengths)


def samples(num_samples: int, **options: Any) -> tuple[Samples]:
    generator = torch.Generator().manual_seed(num_samples)
    dense, label = (
        torch.randn(num_samples, 5, generator=generator),
        torch.rand(num_samples, generator=generator),
    )
    return (Samples(dense, features(num_samples, **options), label),)


@pytest.mark.parametrize(
    "options", [{}, {"is_weighted": True}, {"by_offsets": True}], ids=["lengths", "weighted", "offsets"]
)
def test_numbers_of_ids_and_samples(options: dict[str, bool]) -> None:
    batches = [samples(number, **options) for number in (7, 5, 12, 30, 2, 7)]
    batches[2][0].features.to_dict()  # which keeps what it computes
    model = Recommender(options.get("is_weighted", False))
    step, same = train(log_loss, model, batches)
    assert same
    assert len(step.captures) == 1


def test_other_ids_show() -> None:
    first, second = samples(7), samples(7)
    second[0].features.values()[0] += 1
    model = Recommender()
    step = capture_train_step(log_loss, model, *first)
    assert not same_bits(step(*first), step(*second))


def test_no_ids_and_one_sample() -> None:
    batches = [samples(7), samples(3, max_length=1), samples(1), samples(6)]
    step, same = train(log_loss, Recommender(), batches)
    assert same
    assert len(step.captures) == 3


def test_jagged_and_keyed_tensors() -> None:
    def loss_fn(model: nn.Module, jagged: Any, keyed: Any) -> torch.Tensor:
        pooled = F.embedding_bag(jagged.values(), model.table, jagged.offsets()[:-1], mode="sum")
        return (model.layer(keyed["x"]) * pooled).square().mean()

    def batch(number: int) -> tuple[Any, Any]:
        of_jagged = features(number)["b"]
        jagged = torchrec.JaggedTensor(of_jagged.values(), lengths=of_jagged.lengths())
        values = torch.randn(number, 6, generator=torch.Generator().manual_seed(number))
        return jagged, torchrec.KeyedTensor(["w", "x"], [2, 4], values)

    model = Net()
    model.table = nn.Parameter(torch.randn(20, 3))
    step, same = train(loss_fn, model, [batch(number) for number in (7, 5, 12)])
    assert same
    assert len(step.captures) == 1


def keyed(**options: Any) -> Any:
    return torchrec.KeyedJaggedTensor(["a", "b"], torch.arange(4), **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "per_key": (
        lambda: keyed(lengths=torch.tensor([1, 1, 2]), stride_per_key_per_rank=[[1], [2]]),
        "has a number of samples for each key (VBE), which a captured step does not follow",
    ),
    "inverse": (
        lambda: keyed(
            lengths=torch.ones(4, dtype=torch.long),
            inverse_indices=(["a", "b"], torch.zeros(2, 2, dtype=torch.long)),
        ),
        "has inverse_indices, which a captured step does not follow; make them an item of the batch",
    ),
    "stride": (
        lambda: keyed(lengths=torch.ones(4, dtype=torch.long), stride=1),
        (
            "was made with stride=1, and has 4 lengths for 2 keys: a captured step takes the number of "
            "samples from the "
            "lengths. Leave stride out"
        ),
    ),
    "key_dim": (
        lambda: torchrec.KeyedTensor(["a"], [2], torch.ones(2, 3), key_dim=0),
        "has another key_dim than 1; transpose its values",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_values_of_torchrec(name: str) -> None:
    make, reason = REFUSED[name]
    message = f"batch[0] {reason}, or use torch.compile(model, backend='graphpasses')"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture_train_step(lambda model, _: model.layer.weight.sum(), Net(), make())


def test_other_keys() -> None:
    step = capture_train_step(log_loss, Recommender(), *samples(3), recapture=False)
    other = samples(3)
    given = other[0].features
    other[0].features = torchrec.KeyedJaggedTensor(["c", "a", "b"], given.values(), lengths=given.lengths())
    message = (
        "batch[0].features was of keys ['a', 'b', 'c'] in the captured batch, and is of ['c', 'a', 'b']; capture a "
        "step for this structure"
    )
    with pytest.raises(BatchMismatchError, match=f"^{re.escape(message)}$"):
        step(*other)
