"""Replace operators by what Inductor decomposes them into."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import fake_mode_of

_META = ("stack_trace", "nn_module_stack", "seq_nr", "custom", "partitioner_tag", "recompute", "ac_graph_id")


def decompose(module: fx.GraphModule) -> None:
    """Replaces, in place, every operator that Inductor decomposes by what it is made of.

    The graph is functional, and its nodes have ``meta["val"]``; passes saw operators as autograd calls them.
    """
    table = select_decomp_table()
    graph = module.graph
    nodes = list(graph.nodes)
    mode = fake_mode_of([node.meta.get("val") for node in nodes])  # also for what makes tensors from numbers
    for node in nodes:
        if node.op == "call_function" and node.target in table:
            _inline(graph, node, table, mode)
    graph.eliminate_dead_code()
    module.recompile()


def _inline(graph: fx.Graph, node: fx.Node, table: dict[Any, Any], mode: FakeTensorMode | None) -> None:
    values, spec = pytree.tree_flatten((node.args, node.kwargs))
    sources = [value for value in values if isinstance(value, fx.Node)]

    def call(*given: Any) -> Any:
        remaining = iter(given)
        leaves = [next(remaining) if isinstance(value, fx.Node) else value for value in values]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    vals = [source.meta["val"] for source in sources]
    with mode or nullcontext(), torch.no_grad():
        inner = make_fx(call, decomposition_table=table, _allow_non_fake_inputs=True)(*vals).graph
    if any(item.target is node.target for item in inner.nodes):
        return  # the decomposition declined
    placeholders = inner.find_nodes(op="placeholder")
    with graph.inserting_before(node):
        mapping = dict(zip(placeholders, sources, strict=True))
        for item in inner.nodes:
            if item.op in ("placeholder", "output"):
                continue
            new = mapping[item] = graph.node_copy(item, mapping.__getitem__)
            new.meta.update({key: node.meta[key] for key in _META if key in node.meta})
    result: Any = fx.node.map_arg(inner.output_node().args[0], mapping.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # operator.getitem
            part = result[user.args[1]]
            user.replace_all_uses_with(part)
            graph.erase_node(user)
    graph.erase_node(node)
