"""The patches: they fit the installed TorchRec, leave eager alone, and go when they are done."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec")

from tests.embedding.recommenders import ids  # loads TorchRec without its warnings  # isort: skip

from graphpasses.embedding import torchrec_patches
from graphpasses.embedding.torchrec_patches import Patch, apply_patches, check_key_order, remove_patches
from graphpasses.errors import KeyOrderError, UnsupportedError

ALL = (*torchrec_patches._DDP, *torchrec_patches._TORCHREC)
ADDED = "_graphpasses_check_features"


def value_of(patch: Patch) -> Any:
    owner, name, _ = patch.resolve()
    return vars(owner).get(name)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.target.rpartition(":")[2])
def test_patches_are_put_in_place_and_taken_back(patch: Patch) -> None:
    original = value_of(patch)
    assert (original is None) == (patch.target.endswith(ADDED))
    apply_patches()
    try:
        assert value_of(patch) is not original
        apply_patches()
        remove_patches()
        assert value_of(patch) is not original
    finally:
        remove_patches()
    assert value_of(patch) is original


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.target.rpartition(":")[2])
def test_patches_say_why_and_keep_signatures(patch: Patch) -> None:
    assert patch.wrap.__doc__
    owner, name, replacement = patch.resolve()
    original = vars(owner).get(name)
    if original is not None:
        assert type(replacement) is type(original)
        assert getattr(replacement, "__name__", name) == name


def test_what_a_user_patched_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any) -> None: ...

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "forward", forward)
    apply_patches()
    remove_patches()
    assert torch.nn.parallel.DistributedDataParallel.forward is forward


def test_threads_share_the_patches() -> None:
    forward = torch.nn.parallel.DistributedDataParallel.forward
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        apply_patches()
        entered.set()
        leave.wait()
        remove_patches()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    apply_patches()
    remove_patches()
    assert torch.nn.parallel.DistributedDataParallel.forward is not forward
    leave.set()
    thread.join()
    assert torch.nn.parallel.DistributedDataParallel.forward is forward


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.0+cpu")
    torchrec_patches._replacements.cache_clear()
    try:
        with pytest.raises(UnsupportedError) as error:
            apply_patches()
    finally:
        torchrec_patches._replacements.cache_clear()
    assert str(error.value) == (
        "TorchRec 1.9.0 was not tested with graphpasses, which changes functions inside of it to trace them; "
        "install torchrec 1.8.0"
    )


def test_torchrec_is_not_loaded_for_its_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrec")
    apply_patches()
    try:
        assert all(value_of(patch) is None for patch in ALL if patch.target.endswith(ADDED))
        assert "torchrec" not in sys.modules
    finally:
        remove_patches()


def sharding(*names: str) -> SimpleNamespace:
    return SimpleNamespace(feature_names=lambda: list(names))


def sharded(order: list[int], *, is_new: bool = False, is_sequence: bool = False) -> Any:
    """Returns what the check reads of a sharded module that looks for b, c and a, in this order."""
    shardings = [sharding("b", "c"), sharding("a")]
    module = SimpleNamespace(
        _module_fqn="sparse.ebc", _has_uninitialized_input_dist=is_new, _features_order=order
    )
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


def test_recat_by_sample_is_what_eager_does_for_unequal_batches() -> None:
    from torchrec.distributed import dist_data

    assert torch.ops.fbgemm  # registered by the import of recommenders
    (patch,) = (patch for patch in ALL if patch.target.endswith("_get_recat"))
    _, _, traced = patch.resolve()

    def permute(sizes: list[int], stagger: int) -> torch.Tensor:
        return torch.compile(traced, backend="eager", fullgraph=True)(2, 4, stagger, None, sizes)

    for stagger in (1, 2):
        unequal = dist_data._get_recat(2, 4, stagger, None, [3, 1, 0, 2])
        assert torch.equal(permute([3, 1, 0, 2], stagger), unequal)
        # For equal batches eager permutes whole features; sample by sample it is the same permutation.
        by_feature = dist_data._get_recat(2, 4, stagger, None, [3, 3, 3, 3])
        by_sample = (by_feature.unsqueeze(1) * 3 + torch.arange(3)).flatten()
        assert torch.equal(permute([3, 3, 3, 3], stagger), by_sample)


def test_eager_calls_are_as_before() -> None:
    features = ids(0, 0, 2)
    tensors = [features.lengths(), features.values()]
    arguments = (features.keys(), tensors, False, 1, torch.tensor([0, 1], dtype=torch.int32), [5])
    expected = type(features).dist_init(*arguments)
    apply_patches()
    try:
        result = type(features).dist_init(*arguments)
    finally:
        remove_patches()
    assert torch.equal(result.values(), expected.values())
    assert torch.equal(result.lengths(), expected.lengths())
