"""A private API that this torch lacks is named, with the versions that have it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from graphpasses._torch.tested_versions import missing_api
from graphpasses.errors import UnsupportedError


def test_other_import_errors_are_quoted() -> None:
    message = str(missing_api("flying", ImportError("no feathers"), "2.13"))
    assert message.startswith(f"flying needs the private API no feathers, which torch {torch.__version__} ")


@pytest.mark.parametrize(
    ("module", "what", "home", "name"),
    [
        (
            "compile_backend",
            "torch.compile with graphpasses",
            "torch._C._dynamo.eval_frame",
            "_get_cache_entries_for_region",
        ),
    ],
)
def test_as_with_torch_2_11(module: str, what: str, home: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module(home), name)
    monkeypatch.delitem(sys.modules, f"graphpasses._torch.{module}", raising=False)
    with pytest.raises(UnsupportedError) as error:
        importlib.import_module(f"graphpasses._torch.{module}")
    start = f"{what} needs the private API {home}.{name}, which torch {torch.__version__} does not have; torch 2.13 "
    assert str(error.value).startswith(start)
