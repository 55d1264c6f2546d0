"""Real computation in the midst of tracing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch

__all__ = ["outside_tracing"]


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Makes tensors real and calls untraced, as AOTAutograd's partitioner does to ask the other ranks."""
    with no_dispatch(), unset_fake_temporarily():
        yield
