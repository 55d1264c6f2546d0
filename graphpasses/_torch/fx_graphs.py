"""Large FX graphs: copies in a third of torch's time, and modules that generate code when they are first run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule

from graphpasses.gc_pause import paused_gc


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Returns a graph of new nodes with the names of the old, which share the values of their metadata."""
    result = fx.Graph()
    graph: Any = result
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        args, kwargs = fx.node.map_arg((node._args, node._kwargs), values.__getitem__)
        values[node] = new = fx.Node(result, node.name, node.op, node.target, args, kwargs, node.type)
        new.meta.update(node.meta)
        graph._insert(new)
        graph._find_nodes_lookup_table.insert(new)
    graph._len = len(values)
    names: Any = source._graph_namespace
    graph._graph_namespace._used_names = set(names._used_names)
    graph._graph_namespace._base_count = dict(names._base_count)
    return result


def lazy_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that generates its code when it is first called, or printed; ``root`` holds what it reads."""
    return _LazyModule(root, graph)


# A call at the beginning of a statement, where no text can be that is an argument.
_OPERATOR_CALL = re.compile(r"^(    \w+ = )torch\.ops\.(\w+\.\w+\.\w+)\(", re.MULTILINE)


def quick_call(module: Any) -> Callable[..., Any]:
    """Returns what a graph module does when it is called, without its hooks, and with its operators looked up once.

    The module's own code looks an operator up in four steps, at each call, and calls it through Python. A module that
    was recompiled since runs what its graph says then. What is no graph module is returned.
    """
    if not isinstance(module, fx.GraphModule):
        return module  # type: ignore[no-any-return]
    kind: Any = type(module)  # each has a class of its own
    made: dict[Any, Callable[..., Any]] = {}

    def call(*values: Any) -> Any:
        version = kind.forward if (number := getattr(kind, "num_recompiles", None)) is None else number
        if (forward := made.get(version)) is None:  # another thread may be here, too
            forward = _bound_forward(module)
            made.clear()
            made[version] = forward
        try:
            return forward(module, *values)
        except Exception as error:
            if not isinstance(error, torch.OutOfMemoryError):
                error.add_note(_FAILED)
            raise

    return call


_FAILED = (
    "A captured graph failed, which calls the same operators for each batch. Where loss_fn catches an error, compute "
    "without it (torch.linalg.cholesky_ex, torch.where); where a mask selects one row or none, ask for that, as in "
    "`if rows.shape[0] > 1`: the step is captured again for such a batch"
)


def _bound_forward(module: fx.GraphModule) -> Callable[..., Any]:
    paths: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = f"_operator_{match[2].replace('.', '_')}"
        paths[name] = match[2]
        return f"{match[1]}{name}("

    with paused_gc():
        code = module.graph.python_code("self")
        source = code.src if "_operator_" in code.src else _OPERATOR_CALL.sub(renamed, code.src)
        operators = {name: functools.reduce(getattr, path.split("."), torch.ops)._op for name, path in paths.items()}
        forward: Callable[..., Any] = graph_module._forward_from_src(source, code.globals | operators)
        module._lineno_map = code._lineno_map  # from lines of frames to nodes, as torch sets it
    return forward


class _LazyModule(_LazyGraphModule):
    num_recompiles = 0

    @classmethod
    def recompile(cls) -> None:  # type: ignore[override]
        cls.num_recompiles += 1
        super().recompile()
