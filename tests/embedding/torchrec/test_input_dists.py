"""Which orders of features a sharded module takes; in real modules see test_capture.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphpasses.embedding.torchrec.input_dists import check_key_order
from graphpasses.errors import KeyOrderError


def sharding(*names: str) -> SimpleNamespace:
    return SimpleNamespace(feature_names=lambda: list(names))


def sharded(order: list[int], *, is_new: bool = False, is_sequence: bool = False) -> Any:
    """Returns what the check reads of a sharded module that looks for b, c and a, in this order."""
    shardings = [sharding("b", "c"), sharding("a")]
    module = SimpleNamespace(_module_fqn="sparse.ebc", _has_uninitialized_input_dist=is_new, _features_order=order)
    if is_sequence:
        module._sharding_type_to_sharding = dict(enumerate(shardings))
    else:
        module._embedding_shardings = shardings
    return module


@pytest.mark.parametrize(
    ("order", "keys"),
    [([1, 2, 0], "abc"), ([1, 2, 0], "abcx"), ([2, 3, 1], "xabc"), ([], "bca"), ([], "bcax")],
)
@pytest.mark.parametrize("is_sequence", [False, True])
def test_features_in_their_order_are_accepted(order: list[int], keys: str, is_sequence: bool) -> None:
    check_key_order(sharded(order, is_sequence=is_sequence), list(keys))


@pytest.mark.parametrize(
    ("order", "keys", "expected"),
    [([1, 2, 0], "bac", "abc"), ([1, 2, 0], "ab", "abc"), ([], "abc", "bca"), ([2, 3, 1], "abc", "abc")],
)
def test_features_in_another_order_are_refused(order: list[int], keys: str, expected: str) -> None:
    with pytest.raises(KeyOrderError) as error:
        check_key_order(sharded(order), list(keys))
    assert str(error.value) == (
        f"'sparse.ebc' was first called with features {list(expected)}, now with {list(keys)}; a sharded module "
        "takes every KeyedJaggedTensor in the order of its first: reorder it with kjt.permute(...)"
    )


def test_a_new_module_takes_any_order_of_all_features() -> None:
    check_key_order(sharded([], is_new=True), list("cab"))
    with pytest.raises(KeyOrderError) as error:
        check_key_order(sharded([], is_new=True), list("ca"))
    assert str(error.value) == "'sparse.ebc' was called without features ['b']; it was given ['c', 'a']"
