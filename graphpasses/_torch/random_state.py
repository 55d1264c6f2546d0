"""Who sets the state of the random number generators while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["watch_random_state"]


@contextmanager
def watch_random_state() -> Iterator[set[bool]]:
    """Yields a set that holds, for each time that the block sets the default generator, whether backward ran then.

    ``torch.utils.checkpoint`` sets it in backward, to what it was in forward.

    Example:
        >>> with watch_random_state() as in_backward:
        ...     _ = torch.manual_seed(0)
        >>> in_backward
        {False}
    """
    in_backward: set[bool] = set()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # No public way to ask whether autograd's engine runs in this thread. Tested: 2.13.
            in_backward.add(torch._C._current_graph_task_id() != -1)
            return function(*args, **kwargs)

        return call

    names = ("manual_seed", "seed", "set_rng_state")
    watch = {name: watched(getattr(torch, name)) for name in names}
    replace: Any = mock.patch.multiple
    with replace(torch, **watch), replace(torch.random, **watch):
        yield in_backward
