"""How long operators take: measured seconds, by operator and by what it is called with. Equal calls take as long."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx


def seconds_by_call(measured: Iterable[tuple[fx.Node, float]]) -> dict[str, float]:
    """Returns the median of what equal calls took, see :func:`describe_call`."""
    found: dict[str, list[float]] = {}
    for node, seconds in measured:
        found.setdefault(describe_call(node), []).append(seconds)
    return {call: statistics.median(each) for call, each in found.items()}


def describe_call(node: fx.Node) -> str:
    """Returns the operator of a call, the layout of the tensors that it is given, and its other arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: _layout(read.meta.get("val")))
    return f"{node.target}{args}{kwargs or ''}"


def _layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [*map(_layout, value)]
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, [*value.shape], *(() if value.is_contiguous() else (value.stride(),))
