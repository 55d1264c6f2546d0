"""What becomes of a model's arguments."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec")

from tests.helpers.recommenders import BATCH_SIZE, ids  # loads TorchRec without its warnings  # isort: skip

from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.datasets.utils import Batch

from graphpasses.embedding.torchrec.inputs import prepare_inputs
from tests.helpers.recommenders import batch_sizes_per_feature

Pair = namedtuple("Pair", ["features", "other"])


@dataclass(frozen=True)
class Frozen:
    features: KeyedJaggedTensor
    other: int = 1


@dataclass(slots=True)
class Slotted:
    features: KeyedJaggedTensor


def prepared(value: Any) -> Any:
    (result,), _, _ = prepare_inputs((value,), {})
    return result


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda features: features, lambda value: value),
        (lambda features: [1, {"a": (features,)}], lambda value: value[1]["a"][0]),
        (lambda features: OrderedDict(a=features), lambda value: value["a"]),
        (lambda features: Pair(features, 2), lambda value: value.features),
        (Frozen, lambda value: value.features),
        (Slotted, lambda value: value.features),
        (lambda features: Batch(torch.ones(1), features, torch.ones(1)), lambda value: value.sparse_features),
    ],
    ids=["alone", "nested", "dict", "namedtuple", "frozen", "slots", "pipelineable"],
)
def test_inputs_lose_their_caches(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> None:
    features = ids(0, 0, 2)
    features.to_dict()
    features.offset_per_key()
    value = wrap(features)
    result = prepared(value)
    assert type(result) is type(value)
    assert unwrap(value) is features
    assert features._jt_dict is not None
    tensors = unwrap(result)
    assert tensors is not features
    assert tensors._jt_dict is None
    assert tensors._length_per_key is tensors._offset_per_key is None
    assert tensors.keys() == features.keys()
    assert tensors.stride() == BATCH_SIZE
    assert tensors.values().data_ptr() == features.values().data_ptr()
    assert torch.equal(tensors.lengths(), features.lengths())
    assert not hasattr(features.values(), "_dynamo_unbacked_indices")


def test_what_holds_no_features_stays_the_same_object() -> None:
    value = [
        {"a": torch.ones(2)},
        (1, "b"),
        Frozen(None),
        Pair(1, 2),
        KeyedTensor(["a"], [2], torch.ones(1, 2)),
    ]
    assert prepared(value) is value


def test_tensors_with_a_row_per_sample_may_vary() -> None:
    rows, other, scalar = torch.rand(BATCH_SIZE, 3, requires_grad=True), torch.rand(3), torch.tensor(1.0)
    features, (row, same, *kept) = prepared((ids(0, 0, 2), (rows, rows, other, scalar)))
    assert features.lengths()._dynamo_weak_dynamic_indices == row._dynamo_weak_dynamic_indices == {0}
    assert row is same
    assert (row is not rows, row.data_ptr() == rows.data_ptr()) == (True, True)
    assert not hasattr(rows, "_dynamo_weak_dynamic_indices")
    assert kept[0] is other
    assert kept[1] is scalar
    row.sum().backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_one_object_stays_one() -> None:
    features = ids(0, 0, 2)
    left, right = prepared([features, features])
    assert left is right


def test_inputs_keep_dtypes_and_gradients() -> None:
    weights = torch.rand(3, requires_grad=True)
    features = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2, 3], dtype=torch.int32), weights=weights, offsets=torch.tensor([0, 1, 1, 3])
    )
    result = prepared(features)
    assert result.values().dtype == torch.int32
    assert result.lengths().tolist() == [1, 0, 2]
    assert features.lengths_or_none() is None
    assert not result.weights()._is_view()
    (2 * result.weights()).sum().backward()
    assert torch.equal(weights.grad, torch.full((3,), 2.0))


def test_jagged_tensors_are_prepared() -> None:
    jagged = JaggedTensor(torch.rand(3, requires_grad=True), offsets=torch.tensor([0, 1, 3]))
    result = prepared({"a": jagged})["a"]
    assert result.lengths().tolist() == [1, 2]
    assert result.offsets_or_none() is None
    assert result.values().requires_grad


def test_batch_sizes_per_feature_stay() -> None:
    features = batch_sizes_per_feature(0, 0)
    result = prepared(features)
    assert result.variable_stride_per_key()
    assert result.stride_per_key() == features.stride_per_key()
    assert result.inverse_indices() is features.inverse_indices()


@dataclass
class Mutable:
    features: KeyedJaggedTensor
    other: Any = 1


def test_what_a_call_does_to_containers_it_does_to_the_users() -> None:
    features, dense = ids(0, 0, 2), torch.ones(BATCH_SIZE, 1)
    dictionary, items, untouched = {"a": features, "b": dense, "c": 1}, [features, dense], [features]
    value = Mutable(features, [dictionary])
    (new, new_items), _, write_back = prepare_inputs((value, items), {"more": untouched})
    new.other[0].pop("a")
    new.other[0]["d"] = new_items[0]
    new_items.append(new_items.pop(0))
    new.features, new.added = None, new_items[0]
    write_back()
    assert {**dictionary} == {"b": dense, "c": 1, "d": features}
    assert list(map(id, items)) == [id(dense), id(features)]
    assert value.features is None
    assert value.other[0] is dictionary
    assert value.added is dense
    assert untouched[0] is features
