"""The checks that ``torch.distributions`` makes of what it is given, in the form in which a graph can make them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

_INVALID = (
    "Expected the parameters, or the value, of a torch.distributions distribution to satisfy its constraints, but "
    "found invalid values, as nan"
)


@contextmanager
def checks_asserted() -> Iterator[None]:
    """Has distributions whose ``validate_args`` is on, as it is by default, assert that all is valid.

    They read the answer, and raise; a graph has an operator that raises. What is asserted is no decision.
    """
    original = torch._is_all_true

    def all_true(values: torch.Tensor) -> torch.Tensor:
        answer = original(values)
        if sys._getframe(1).f_globals["__name__"].startswith("torch.distributions."):
            torch._assert_async(answer, _INVALID)
        return answer

    with mock.patch.object(torch, "_is_all_true", all_true):
        yield
