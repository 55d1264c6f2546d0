"""Real computation while a tracer is active."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Makes tensors real and calls untraced, as AOTAutograd's partitioner does to ask the other ranks.

    The Python dispatcher, which is on while AOTAutograd traces, keeps the GIL while an operator runs. A collective
    would then wait for gloo's queue, whose thread may hold it and wait for the GIL, to free what an earlier one used.
    """
    with no_dispatch(), unset_fake_temporarily(), no_python_dispatcher():
        yield
