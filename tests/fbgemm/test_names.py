from __future__ import annotations

import importlib
import sys

import pytest

from graphpasses.errors import CaptureError
from graphpasses.fbgemm.names import load_fbgemm


def test_missing_fbgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(CaptureError) as error:
        load_fbgemm()
    assert str(error.value) == ("TorchRec models need FBGEMM, which is not installed; install graphpasses[torchrec]")


def test_fbgemm_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise OSError("fbgemm_gpu_config.so: undefined symbol: _ZN3c10")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(
        CaptureError, match=r"does not load with torch 2\.\d+\.\d+.*: fbgemm_gpu_config\.so: undefined"
    ):
        load_fbgemm()
