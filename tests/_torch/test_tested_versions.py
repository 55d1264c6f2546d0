"""A torch that was never tested is named, once, when something depends on it."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from graphpasses._torch.tested_versions import TESTED, warn_of_untested_torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.11.0a0+git12"])
def test_nothing_is_said_of_a_tested_one(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested_torch(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0", "2.1.0", "3.0.0"])
def test_an_untested_one_is_named(version: str) -> None:
    expected = (
        f"graphpasses was tested with torch 2.13, 2.14 and 2.15, and this is {version}: a private API that it lacks "
        "is an error that names it. Before you trust a run, compare it with eager's (graphpasses parity)"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        warn_of_untested_torch(version)


def test_it_is_said_once_at_the_import_of_what_depends_on_torch() -> None:
    code = (
        "import torch; torch.__version__ = '2.99.0'; import graphpasses; print('imported');"
        "graphpasses.capture_train_step; graphpasses.default_pipeline"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "imported\n"
    assert result.stderr.count("and this is 2.99.0") == 1


def test_each_has_a_lock() -> None:
    locks = {path.stem.removeprefix("torch-") for path in (ROOT / ".ci" / "lock").glob("torch-*.txt")}
    assert locks | {"2.13"} == set(TESTED)
