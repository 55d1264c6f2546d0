"""What a model, and its process, hold that running its step may change."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from graphpasses.identity import attributes_restored


@contextmanager
def live_state_restored(model: nn.Module) -> Iterator[None]:
    """Restores parameters, buffers, attributes and gradients of a model, and the state of random number generators.

    Tensors are put back, not what was written into them; of attributes that are lists, dicts and sets the items, too.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    try:
        with attributes_restored(model.modules()), torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
