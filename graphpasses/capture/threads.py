"""What a trace cannot follow, into another thread or into a backward within backward: refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphpasses._torch.fake_mode import watched_in_other_threads
from graphpasses.errors import CaptureError


@contextmanager
def other_threads_refused() -> Iterator[None]:
    """Raises if the block, a trace, gives its tensors to other threads, whose operators the trace does not see."""
    operators: list[object] = []  # torch may end the process where an error is raised in the thread itself

    def refuse(cause: Exception | None = None) -> None:
        if operators:
            raise CaptureError(
                f"loss_fn, forward or backward calls {operators[0]} in another thread, which a capture does not see; "
                "call it in the thread that runs loss_fn"
            ) from cause

    try:
        with watched_in_other_threads(operators.append):
            yield
    except Exception as error:
        refuse(error)
        raise
    refuse()


@contextmanager
def nested_backward_refused() -> Iterator[None]:
    """Raises if backward, which the block runs, runs itself in a way that cannot be traced."""
    try:
        yield
    except RuntimeError as error:
        if "incompatible with .grad()" not in str(error):  # as torch.utils.checkpoint says
            raise
        raise CaptureError(
            "loss_fn checkpoints with use_reentrant=True, whose backward cannot be captured; checkpoint with "
            "use_reentrant=False"
        ) from error
    except SystemError as error:
        raise CaptureError(
            "a backward that calls backward again cannot be captured where torch moves it to another thread, as it "
            f"does from the sixtieth level on: {error}"
        ) from error
