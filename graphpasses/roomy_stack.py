"""Room for the frames of deep calls, in one piece of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def with_roomy_stack(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Lets the frames of all that a function calls lie in one piece of memory.

    Python (3.11 to 3.13) keeps the frames of a thread in pieces of 16 KiB. A call that finds no room maps a new one,
    and unmaps it when it returns: in a loop at such a depth each call takes 200 times as long. Captures whose loops
    met it, by chance, took a quarter longer. A piece is made as large as its first frame needs; the frame here asks
    for much, and leaves half of the piece to others.
    """

    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_NUM_SLOTS)
    return functools.wraps(function)(call)


_NUM_SLOTS = 33_000  # of 8 bytes, so that the piece has 512 KiB; memory that no frame touches is never used
