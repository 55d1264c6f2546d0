"""How many collectives and table lookups a step issues, counted by torch's profiler while it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from experiments.torchrec_parity.results import Calls

__all__ = ["profile_step"]

T = TypeVar("T")

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints when it starts and stops
# nccl_sim, which reduces FSDP's gradients, shows as the messages that it sends.
_COLLECTIVE, _ALL_REDUCE = re.compile(r"c10d::(?!send|recv)\w+"), re.compile(r"c10d::allreduce_\w*")
# Each lookup, and each update of the tables, goes through one of these, eagerly and in a graph.
_LOOKUP = re.compile(r"fbgemm::(split|dense)_embedding_\w+_(pt2_wrapper|lookup_function)")


def profile_step(forward: Callable[[], Tensor]) -> tuple[Tensor, Calls]:
    """Runs a step under the profiler.

    Args:
        forward: computes the loss.

    Returns:
        The loss, after its backward pass, and the step's calls.
    """
    loss, in_forward = _profile(forward)
    _, in_backward = _profile(loss.backward)
    counts = (
        tuple(sum(pattern.fullmatch(name) is not None for name in names) for names in (in_forward, in_backward))
        for pattern in (_COLLECTIVE, _LOOKUP, _ALL_REDUCE)
    )
    return loss, Calls(*counts)


def _profile(function: Callable[[], T]) -> tuple[T, list[str]]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = function()
    return result, [event.name for event in profiler.events()]
