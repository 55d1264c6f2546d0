"""Formulas of autograd that look whether they are traced: a step gets eager's.

That of a whole tensor's largest element writes the gradient into zeros in eager on a CPU, and multiplies it with a
mask where it is traced, which gives zeros another sign, and NaN where the gradient is infinite. Those of products ask
in eager for elements that are zero. That of the value with which a mask is filled adds the elements of the mask alone
in eager, and zeros among them where it is traced. That of what a mask selects has the strides of what it is selected
from in eager, by which kernels behind it round. Source: ``FunctionsManual.cpp``, ``evenly_distribute_backward``,
``prod_backward``, ``cumprod_backward``, ``masked_fill_backward``, ``masked_select_backward``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphpasses._torch.aot_values import adds_gradients
from graphpasses._torch.symbols import UNDECIDED
from graphpasses.analysis.backward import is_backward
from graphpasses.errors import CaptureError
from graphpasses.graph.nodes import argument, fake_value, named_call, refresh_values
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.ops.eager_gradient import EAGER_GRADIENT, MASKED_PLACE, MASKED_SUM

aten = torch.ops.aten


def give_eagers_formulas(graph: fx.Graph, is_backward: Callable[[fx.Node], bool] = is_backward) -> None:
    """Lets a traced step, or a joint graph, compute by an operator of ours what autograd computes otherwise in eager.

    ``is_backward`` says which nodes backward computes.
    """
    if not any(graph.find_nodes(op="call_function", target=each) for each in _FORMULAS):
        return
    # What computes no gradient has the number of what did before.
    calls: dict[object, fx.Node] = {}
    formulas: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op != "call_function" or "seq_nr" not in node.meta:
            continue
        if not is_backward(node):
            calls.setdefault(node.meta["seq_nr"], node)
        # Sums that autograd makes of gradients have the number of the last call.
        elif not adds_gradients(node) and node.meta["seq_nr"] in calls:
            formulas[calls[node.meta["seq_nr"]]].append(node)
    for call, nodes in formulas.items():
        if call.target in _FORMULAS:
            _FORMULAS[call.target](graph, call, nodes, is_backward)


_IsBackward = Callable[[fx.Node], bool]


def _add_filled(graph: fx.Graph, call: fx.Node, formula: list[fx.Node], is_backward: _IsBackward) -> None:
    for total in [node for node in formula if node.target is aten.sum.default]:
        where = argument(total)
        if where.target is aten.where.self and where in formula:
            mask, gradient, _ = where.args
            _take_place(graph, total, MASKED_SUM, (gradient, mask))
            graph.erase_node(where)


def _place_selected(graph: fx.Graph, call: fx.Node, formula: list[fx.Node], is_backward: _IsBackward) -> None:
    for placed in [node for node in formula if node.target is aten.masked_scatter.default]:
        zeros, mask, gradient = argument(placed), *placed.args[1:]
        if zeros.target is aten.zeros_like.default:
            _take_place(graph, placed, MASKED_PLACE, (gradient, argument(zeros), mask))
            if not zeros.users:
                graph.erase_node(zeros)


def _take_place(graph: fx.Graph, node: fx.Node, operator: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        found = graph.call_function(operator, args)
    found.meta.update({**node.meta, "val": fake_value(found)})
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    now, before = ([*map(size_expression, each.meta["val"].stride())] for each in (found, node))
    if now != before:
        refresh_values(graph, [found])


def _replace(graph: fx.Graph, call: fx.Node, formula: list[fx.Node], is_backward: _IsBackward) -> None:
    inside = set(formula)
    operands = {each for node in formula for each in node.all_input_nodes} - inside - {*call.all_input_nodes}
    first = aten.ones_like.default  # the gradient of the loss, which stands before what the engine runs
    given = [each for each in operands if is_backward(each) or each.target in (EAGER_GRADIENT, first)]
    results = [node for node in formula if not inside.issuperset(node.users)]
    refusal = CaptureError(
        f"loss_fn calls {named_call(call)}, whose gradient autograd computes by another formula where it is "
        "traced, and which nodes of the trace that are cannot be told. Compute it with other operators"
    )
    if len(given) != 1 or len(results) != 1:
        raise refusal
    (gradient,), (result,) = given, results
    operand, *others = call.args
    arguments = json.dumps(others), call.kwargs.get("dtype")
    name = str(call.target).removeprefix("aten.")
    try:
        _take_place(graph, result, EAGER_GRADIENT, (gradient, operand, name, *arguments))
    except UNDECIDED as error:  # of a number of rows that only running tells
        raise refusal from error
    for node in reversed(formula):
        if node is not result:
            graph.erase_node(node)


# How eager's formula of an operator takes the place of the traced one.
_FORMULAS: dict[Any, Callable[[fx.Graph, fx.Node, list[fx.Node], _IsBackward], None]] = {
    **dict.fromkeys((aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default), _replace),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int, aten.cumprod.default), _replace),
    **dict.fromkeys((aten.masked_fill.Tensor, aten.masked_fill_.Tensor), _add_filled),
    aten.masked_select.default: _place_selected,
}
