"""Parts of a graph, as torch's partitioners cut them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs


def extracted(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[Any], name: str) -> fx.GraphModule:
    """Returns the part of a graph that computes outputs of inputs, and what writes in place in it.

    ``name`` is that of the part, for torch's errors. Waits are in it where an output needs them.
    """
    unknown: Any = [None] * len(outputs)
    wait = torch.ops._c10d_functional.wait_tensor
    kept = fx.node._side_effectful_functions - {wait, wait.default}
    with mock.patch.object(fx.node, "_side_effectful_functions", kept):
        graph = _extract_graph_with_inputs_outputs(
            module.graph, list(inputs), list(outputs), unknown, name, ignore_must_be_in_fw_bw=True
        )
    return fx.GraphModule(module, graph)
