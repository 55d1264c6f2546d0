"""Texts: tables, lists that are cut, suggestions, names in checkpoints."""

from __future__ import annotations

from graphpasses.identity import unwrapped_name
from graphpasses.text import aligned, did_you_mean, some


def test_tables() -> None:
    rows = [("pass", "ms"), ("prefetch-collectives", "1.0")]
    assert aligned(rows) == ["pass                  ms", "prefetch-collectives  1.0"]
    assert aligned([("pass",), ("a",), ("b",), ("c",)], max_rows=1) == ["pass", "a", "… and 2 more"]


def test_names() -> None:
    assert some(["a", "b", "c", "d"], limit=2) == "a, b and 2 more"
    assert did_you_mean("layer.0", ["layers.0", "norm"]) == "; did you mean 'layers.0'?"
    assert unwrapped_name("layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
