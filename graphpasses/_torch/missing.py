"""What is said where this torch lacks a private API."""

from __future__ import annotations

import re

import torch

from graphpasses.errors import UnsupportedError


def missing_api(what: str, error: ImportError, versions: str) -> UnsupportedError:
    """Returns the error that names a private API, and the versions that have it.

    Example:
        >>> print(missing_api("flying", ImportError("cannot import name '_wing' from 'torch.body' (x.py)"), "2.13"))
        ... # doctest: +ELLIPSIS
        flying needs the private API torch.body._wing, which torch ... does not have; torch 2.13 has it. Install ...
    """
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    name = f"{found[2]}.{found[1]}" if found else str(error)
    return UnsupportedError(
        f"{what} needs the private API {name}, which torch {torch.__version__} does not have; torch {versions} has "
        "it. Install that, or capture the step of an FSDP2 model, which needs no torch.compile"
    )
