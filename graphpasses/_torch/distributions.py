"""The checks that ``torch.distributions`` makes of what it is given, in the form in which a graph can make them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_INVALID = (
    "Expected the parameters, or the value, of a torch.distributions distribution to satisfy its constraints, but "
    "found invalid values, as nan"
)

_LOCK = threading.Lock()
_inside: list[int] = []  # the threads in the block, which may be ranks that take turns
_is_all_true = torch._is_all_true


@contextmanager
def checks_asserted() -> Iterator[None]:
    """Has distributions whose ``validate_args`` is on, as it is by default, assert in this thread that all is valid.

    They read the answer, and raise; a graph has an operator that raises. What is asserted is no decision.
    """
    thread = threading.get_ident()
    with _LOCK:
        _inside.append(thread)
        torch._is_all_true = _asserted
    try:
        yield
    finally:
        with _LOCK:
            _inside.remove(thread)
            if not _inside:
                torch._is_all_true = _is_all_true


def _asserted(input: torch.Tensor) -> torch.Tensor:
    answer = _is_all_true(input)
    asking = sys._getframe(1).f_globals["__name__"]
    if threading.get_ident() in _inside and asking.startswith("torch.distributions."):
        torch._assert_async(answer, _INVALID)
    return answer
