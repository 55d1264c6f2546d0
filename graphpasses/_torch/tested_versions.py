"""Which versions of torch the private APIs were tested with, and what is said where one lacks an API."""

from __future__ import annotations

import re
import warnings

import torch

from graphpasses.errors import UnsupportedError

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The first two numbers of torch's version: what tests, and repairs of one version, ask."""

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


def missing_api(what: str, error: ImportError, versions: str) -> UnsupportedError:
    """Returns the error that names a private API, and the versions that have it."""
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    name = f"{found[2]}.{found[1]}" if found else str(error)
    return UnsupportedError(
        f"{what} needs the private API {name}, which torch {torch.__version__} does not have; torch {versions} has "
        "it. Install that, or capture the step of an FSDP2 model, which needs no torch.compile"
    )
