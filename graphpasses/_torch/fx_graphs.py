"""Large FX graphs: their nodes, copies and code, and modules that generate it when it is first run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, cached_property
from itertools import repeat
from operator import attrgetter, is_
from types import BuiltinFunctionType
from typing import Any, ClassVar

import torch
from torch import fx

# torch's own GraphModule whose code is generated at the first call, which Inductor's passes use; a step is rewritten
# several times before it runs, and generating its code takes longer than a pass. Tested: 2.13.
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import PythonCode

from graphpasses._torch.fx_code import quick_code, short_code, torchs_text
from graphpasses.gc_pause import paused_gc

__all__ = [
    "LargeGraph",
    "called_targets",
    "changed_nodes",
    "copy_graph",
    "generate_code",
    "is_well_formed",
    "lazy_module",
]

_compiled: ContextVar[fx.Graph | None] = ContextVar("_compiled", default=None)
"""The graph of whose code :class:`_LazyModule` asks for the text to compile."""

_PLAIN = frozenset({bool, float, int, str, torch.dtype, type(None), fx.Node})


class LargeGraph(fx.Graph):
    """A graph whose nodes and code are torch's own, and take a third of its time. Tested: 2.13."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **names: Any
    ) -> fx.Node:
        """Makes a node at the insertion point; torch looks through its arguments for raw symbols, which warn.

        Args:
            op: kind of the node.
            target: what it calls.
            args: its arguments.
            kwargs: its keyword arguments.
            rest: name and type; names likewise.
            names: name and type.
        """
        hooks = getattr(self.owning_module, "_create_node_hooks", None)
        if op != "call_function" or hooks or any(rest) or any(names.values()) or not _are_plain(args, kwargs):
            return super().create_node(op, target, args, kwargs, *rest, **names)
        graph: Any = self
        namespace = graph._graph_namespace
        name = namespace.create_name(_name_of(self, target), None)
        node = fx.Node(self, name, op, target, args or (), kwargs or {})
        namespace.associate_name_with_obj(name, node)
        graph._insert(node)
        graph._find_nodes_lookup_table.insert(node)
        graph._len += 1
        return node

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        """Returns the code.

        Args:
            root_module: what it calls its module.
            options: torch's own.
        """
        generate = short_code if _compiled.get() is self else quick_code
        code = None if any(options.values()) else generate(self, root_module)
        return super().python_code(root_module, **options) if code is None else code


def _name_of(graph: Any, target: Any) -> str:
    """Returns what calls of a target are named, but for their numbers."""
    lives_on = isinstance(target, (torch._ops.OpOverload, BuiltinFunctionType))
    return _operator_name(target) if lives_on else graph._target_to_str(target)


@cache
def _operator_name(target: Any) -> str:
    graph: Any = fx.Graph()
    return re.sub(r"\W+", "_", graph._target_to_str(target), flags=re.ASCII)


def _are_plain(args: Any, kwargs: Any) -> bool:
    """Whether arguments of a call hold nothing but nodes and plain values."""
    if args and type(args) is not tuple:
        return False
    for value in (*(args or ()), *(kwargs or {}).values()):
        if type(value) not in _PLAIN and not (
            isinstance(value, list) and _PLAIN.issuperset(map(type, value))
        ):
            return False
    return True


def called_targets(graph: fx.Graph) -> list[Any]:
    """Returns what the ``call_function`` nodes of a graph call, each once.

    Args:
        graph: the graph.
    """
    table = graph._find_nodes_lookup_table.table
    return [target for (op, target), nodes in table.items() if op == "call_function" and nodes]


def is_well_formed(graph: fx.Graph) -> bool:
    """Whether each node comes after those that it reads, has a name of its own, and is linked to the one before it.

    Args:
        graph: the graph; public accessors of its nodes take twice as long.
    """
    nodes = [*graph.nodes]
    before = map(attrgetter("_prev"), [*nodes, graph._root])
    if not all(map(is_, before, [graph._root, *nodes])) or len({node.name for node in nodes}) < len(nodes):
        return False
    seen: set[fx.Node] = set()
    for node in nodes:
        if not seen.issuperset(node._input_nodes):
            return False
        seen.add(node)
    return True


def changed_nodes(
    graph: fx.Graph, records: Mapping[fx.Node, tuple[object, object, object, object]]
) -> list[fx.Node]:
    """Returns the nodes that are not as recorded.

    Args:
        graph: the graph.
        records: by node its ``target``, ``args``, ``kwargs`` and ``meta["val"]``; compared by identity.
    """
    nodes = [*graph.nodes]
    recorded = map(records.get, nodes, repeat((None, None, None, None)))
    return [
        node
        for node, (target, args, kwargs, value) in zip(nodes, recorded, strict=True)
        if args is not node._args
        or value is not node.meta.get("val")
        or target is not node.target
        or kwargs is not node._kwargs
    ]


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Returns a graph of new nodes, with the names of the old.

    ``Graph.graph_copy`` searches a name for every node and walks its arguments in Python for what a copy cannot have;
    that takes several times as long. Tested: 2.13.

    Args:
        source: the graph; metadata values are shared.
    """
    result = LargeGraph()
    graph: Any = result
    start = torch._C._NodeBase.__init__
    insert, table = graph._root._prepend, graph._find_nodes_lookup_table.table
    tables: dict[
        tuple[str, int], dict[fx.Node, None]
    ] = {}  # by id: operators' hashes take as long as all else
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        op, target = node.op, node.target
        args, kwargs = fx.node.map_arg((node._args, node._kwargs), values.__getitem__)
        new: Any = fx.Node.__new__(fx.Node)  # its constructor looks at the target again
        start(new, graph, node.name, op, target, node.type)
        new._update_args_kwargs(args, kwargs)
        new.meta.update(node.meta)  # to set an attribute of a node looks it up in two tables
        insert(new)
        if (nodes := tables.get((op, id(target)))) is None:
            nodes = tables[op, id(target)] = table[graph._find_nodes_lookup_table._key(new)]
        nodes[new] = None
        values[node] = new
    graph._len = len(values)
    names: Any = source._graph_namespace
    graph._graph_namespace._used_names = set(names._used_names)
    graph._graph_namespace._base_count = dict(names._base_count)
    return result


def lazy_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that generates its code when it is first called, or printed.

    Args:
        root: holds what the graph's ``get_attr`` nodes name.
        graph: the graph.
    """
    return _LazyModule(root, graph)


def generate_code(module: fx.GraphModule) -> None:
    """Generates what a module runs, as its first call does.

    Args:
        module: of :func:`lazy_module`, or any other, which has it.
    """
    _LazyGraphModule.force_recompile(module)


class _LazyModule(_LazyGraphModule):
    """Runs code whose text is shorter than torch's, which ``code`` shows, and which is made when it is read."""

    short: ClassVar[PythonCode]  # of this module alone, as is its class, whose method `forward` it has made

    def real_recompile(self) -> None:
        """Generates the code, unless it is there."""
        if self._needs_recompile():
            token = _compiled.set(self._graph)
            try:
                code = self._real_recompile()
            finally:
                _compiled.reset(token)
            type(self).short = replace(code, src=self.__dict__.pop("_code", code.src))

    @cached_property
    def _code(self) -> str:
        return torchs_text(self.short)

    def _real_recompile(self) -> PythonCode:
        with paused_gc():
            return super()._real_recompile()
