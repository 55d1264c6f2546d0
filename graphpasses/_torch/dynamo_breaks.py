"""Where Dynamo broke the graph, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.utils import graph_break_reasons


@contextmanager
def record_graph_breaks() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, a line per graph break in it.

    Example:
        >>> import torch
        >>> def double(x):
        ...     torch._dynamo.graph_break()
        ...     return 2 * x
        >>> with record_graph_breaks() as breaks:
        ...     _ = torch.compile(double, backend="eager")(torch.ones(2))
        >>> breaks[0].partition(":2 in ")[2]
        'double: Call to `torch._dynamo.graph_break()`. User-inserted graph break. Message: None'
    """
    breaks: list[str] = []
    start = len(graph_break_reasons)
    try:
        yield breaks
    finally:
        # A break in a function breaks its callers at the same line, too.
        breaks += dict.fromkeys(map(_describe, graph_break_reasons[start:]))


def _describe(reason: Any) -> str:
    frame = reason.user_stack[-1]
    # Where a function goes on after a break, Dynamo calls it torch_dynamo_resume_in_<function>_at_<line>.
    function = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", frame.name)
    what, _, details = reason.reason.partition("\n")
    why = re.search(r"Explanation: (.*)", details)
    return f"{frame.filename}:{frame.lineno} in {function}: {what}" + (f". {why[1]}" if why else "")
