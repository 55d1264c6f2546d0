"""Which versions of torch the private APIs were tested with."""

from __future__ import annotations

import warnings

import torch

TESTED = ("2.13", "2.14", "2.15")
_IN_PART = ("2.11",)  # what experiments/gpu/README.md lists


def warn_of_untested_torch(version: str = torch.__version__) -> None:
    """Warns where torch is none that was tested: what it lacks is an error, what it does otherwise may be silent."""
    if ".".join(version.split(".")[:2]) in (*TESTED, *_IN_PART):
        return
    tested = f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"
    warnings.warn(
        f"graphpasses was tested with torch {tested}, and this is {version}: a private API that it lacks is an error "
        "that names it. Before you trust a run, compare it with eager's (graphpasses parity)",
        stacklevel=2,
    )
