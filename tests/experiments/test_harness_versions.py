"""What a run had installed is named."""

from __future__ import annotations

import torch

from experiments.harness.versions import installed_versions


def test_what_is_missing_is_left_out() -> None:
    assert torch.__version__.startswith(installed_versions()["torch"])
    assert None not in installed_versions().values()
