"""Which versions a run had."""

from __future__ import annotations

import importlib.metadata

__all__ = ["installed_versions"]

PACKAGES = (
    "torch",
    "torchtitan",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "triton",
    "transformers",
    "numpy",
)


def installed_versions() -> dict[str, str]:
    """Returns the version of each package of what we build on that this Python has; others are not there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
