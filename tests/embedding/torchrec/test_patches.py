"""The patches: they fit the installed TorchRec, and leave eager alone."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

pytest.importorskip("torchrec")

from tests.helpers.recommenders import ids  # loads TorchRec without its warnings  # isort: skip

from graphpasses._torch.patching import Patch, PatchSet
from graphpasses.embedding.torchrec.ddp_calls import DDP_PATCHES
from graphpasses.embedding.torchrec.patches import TORCHREC_PATCHES, _check_version
from graphpasses.errors import UnsupportedError

ALL = (*DDP_PATCHES.patches, *TORCHREC_PATCHES.patches)


def value_of(patch: Patch) -> Any:
    owner, name, _ = patch.resolve()
    return vars(owner).get(name)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.target.rpartition(":")[2])
def test_each_patch_fits_and_says_why(patch: Patch) -> None:
    assert patch.wrap.__doc__
    owner, name, replacement = patch.resolve()
    original = vars(owner).get(name)
    if "graphpasses" in name:
        assert original is None
    elif original is None:
        assert callable(getattr(owner, name))  # which it inherits
    else:
        assert type(replacement) is type(original) or (isinstance(replacement, type) and isinstance(original, type))
        assert getattr(replacement, "__name__", name) == name
    with PatchSet(patch):
        assert value_of(patch) is not original
    assert value_of(patch) is original


@pytest.mark.parametrize("version", ["1.7.0", "1.9.0+cpu"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    patches = PatchSet(*TORCHREC_PATCHES.patches, check=_check_version)
    with pytest.raises(UnsupportedError) as error, patches:
        pass
    assert str(error.value) == (
        f"TorchRec {version.partition('+')[0]} was not tested with graphpasses, which traces it with patches; "
        "install torchrec 1.8.0 or 1.9.2"
    )


def test_local_builds_of_the_tested_version_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.8.0+cu130")
    _check_version()


def test_eager_calls_are_as_before() -> None:
    import torch

    features = ids(0, 0, 2)
    tensors = [features.lengths(), features.values()]
    arguments = (features.keys(), tensors, False, 1, torch.tensor([0, 1], dtype=torch.int32), [5])
    expected = type(features).dist_init(*arguments)
    with TORCHREC_PATCHES:
        result = type(features).dist_init(*arguments)
    assert torch.equal(result.values(), expected.values())
    assert torch.equal(result.lengths(), expected.lengths())
