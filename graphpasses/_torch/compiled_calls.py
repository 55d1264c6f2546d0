"""Calls of what ``torch.compile`` made, while a step is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What compiled functions do when they are called, as `torch.compiler.set_stance` says. Tested: 2.13.
from torch._dynamo import eval_frame

COMPILED_CALL = "symbolically trace a dynamo-optimized function"
"""What torch's error says."""


@contextmanager
def compiled_calls_raise() -> Iterator[None]:
    """Lets torch raise if the block, which is traced, calls a compiled function.

    The tracer asked it not to. Under ``torch.compiler.set_stance("force_eager")`` such a function runs as it is.
    """
    is_compiled = eval_frame._stance.stance != "force_eager"
    with torch._dynamo.config.patch(error_on_nested_fx_trace=is_compiled):
        yield
