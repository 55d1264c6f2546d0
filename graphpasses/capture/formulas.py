"""Formulas of autograd that look whether they are traced: a step gets eager's, or is refused.

That of a whole tensor's largest element writes the gradient into zeros in eager on a CPU, and multiplies it with a
mask where it is traced, which gives zeros another sign, and NaN where the gradient is infinite. That of a product
asks for elements that are zero. Source: ``FunctionsManual.cpp``, ``evenly_distribute_backward``, ``prod_backward``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpasses.analysis.backward import is_backward
from graphpasses.errors import CaptureError
from graphpasses.graph.nodes import argument, fake_value, named_call

aten = torch.ops.aten

_ELEMENTS = (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default)
_PRODUCTS = (aten.prod.default, aten.prod.dim_int)


def give_eagers_formulas(module: fx.GraphModule) -> None:
    """Rewrites the formulas in a traced step that eager computes otherwise; raises where eager decides by values."""
    if not any(module.graph.find_nodes(op="call_function", target=each) for each in _ELEMENTS + _PRODUCTS):
        return
    # What computes no gradient has the number of what did before.
    calls: dict[object, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or "seq_nr" not in node.meta:
            continue
        if not is_backward(node):
            calls.setdefault(node.meta["seq_nr"], node)
            continue
        if (call := calls.get(node.meta["seq_nr"])) is None:
            continue
        if call.target in _PRODUCTS:
            raise CaptureError(
                f"loss_fn calls {named_call(call)}, whose gradient autograd computes by another formula where an "
                "element is zero, and by that one alone where it is traced. Multiply slices (x.unbind(dim)), or take "
                "the last of cumprod"
            )
        if call.target in _ELEMENTS and node.target == aten.mul.Tensor:
            _fill(module.graph, node, argument(call))


def _fill(graph: fx.Graph, product: fx.Node, operand: fx.Node) -> None:
    """Replaces a product of a mask and a number by zeros that the number is written into."""
    if operand.meta["val"].device.type != "cpu":
        return
    mask, share = product.args
    with graph.inserting_before(product):
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        zeros = graph.call_function(aten.zeros_like.default, (operand,), options)
        filled = graph.call_function(aten.masked_fill.Tensor, (zeros, mask, share))
    for node in (zeros, filled):
        node.meta.update({**product.meta, "val": fake_value(node)})
    product.replace_all_uses_with(filled)
    graph.erase_node(product)
