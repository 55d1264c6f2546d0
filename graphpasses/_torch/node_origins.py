"""Where a node of a traced step comes from, and which node generated code computes."""

from __future__ import annotations

import re
from types import FrameType
from typing import Any

from torch import fx

from graphpasses._torch.operator_facts import NOT_THE_USERS
from graphpasses._torch.recorded_operator import Where

MODULE_FQN = "module_fqn"
"""The key of ``meta["custom"]`` that names a node's module; torchtitan's graph_trainer has the same."""

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)')


def origin_of(node: fx.Node) -> Where:
    """Returns where a node comes from, as far as its graph's capture and passes noted it."""
    line = None
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if not frame["file"].startswith(NOT_THE_USERS):
            line = frame["file"], int(frame["line"]), frame["function"]
    module = (node.meta.get("custom") or {}).get(MODULE_FQN, "")
    in_backward = bool(node.meta.get("autograd_backward", False))
    return Where(module, line, in_backward, by_torch=in_backward)


class NodesOfFrames:
    """Finds the node whose call a frame of a graph's generated code is at; the graphs must stay as they are."""

    def __init__(self) -> None:
        self._nodes: dict[fx.GraphModule, list[fx.Node]] = {}

    def find(self, frame: FrameType) -> fx.Node | None:
        """Returns the node; None for a frame of any other code."""
        module: Any = frame.f_locals.get("self")
        if not frame.f_code.co_filename.startswith("<eval_with_key>") or not isinstance(
            module, fx.GraphModule
        ):
            return None
        # By the map of lines that torch itself takes where it traces generated code again. Tested: 2.13.
        lines: Any = module._lineno_map
        index = lines.get(frame.f_lineno - frame.f_code.co_firstlineno)
        if module not in self._nodes:
            self._nodes[module] = list(module.graph.nodes)
        return None if index is None else self._nodes[module][index]
