"""The code of large FX graphs: torch's own, word for word, in a third of its time.

torch asks for the name of a node wherever it stands in the code, and for that of an operator at every call.
"""

from __future__ import annotations

import builtins
import keyword
import os
from typing import Any

import torch
from torch import fx

# _get_qualified_name: under which name code calls an operator. Tested: 2.13.
from torch.fx.graph import CodeGen, PythonCode, magic_methods
from torch.fx.node import _get_qualified_name

__all__ = ["quick_code"]

_LITERALS = frozenset(
    {
        bool,
        float,
        int,
        str,
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        type(None),
    }
)
_OPERATORS = frozenset(magic_methods.values())


class _UnknownCodeError(Exception):
    """Torch has to generate the code."""


def quick_code(graph: fx.Graph, root_module: str) -> PythonCode | None:
    """Returns the code of a graph that calls operators on nodes and numbers; None of any other.

    Args:
        graph: the graph.
        root_module: what the code calls its module.
    """
    codegen: Any = graph._codegen
    is_plain = type(codegen) is CodeGen and codegen._body_transformer is None
    if not is_plain or os.environ.get("FX_GRAPH_SHOW_META", "0") != "0":
        return None
    try:
        return _python_code(graph, root_module)
    except _UnknownCodeError:
        return None


def _python_code(graph: fx.Graph, root_module: str) -> PythonCode:
    nodes = [*graph.nodes]
    if not nodes or nodes[-1].op != "output":
        raise _UnknownCodeError
    empty = fx.Graph()
    empty.output(())
    outline = empty.python_code(root_module)  # has the global names that all code has
    _check_names(nodes, {root_module, *outline.globals, *keyword.kwlist, *dir(builtins)})
    freed = _freed_after(nodes)
    calls: dict[int, str] = {}  # by id: operators' hashes take as long as all else
    parameters: list[str] = []
    lines: list[str] = []
    indices: list[int] = []
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            if node.args or node.target != node.name:
                raise _UnknownCodeError
            parameters.append(node.name)
            continue
        if node.op == "call_function" and "is_wrapped" not in node.meta:
            if (call := calls.get(id(node.target))) is None:
                call = calls[id(node.target)] = _call(node.target)
            line = f"{node.name} = {_call_text(call, node)}"
        elif node.op == "get_attr" and all(map(str.isidentifier, node.target.split("."))):
            line = f"{node.name} = {root_module}.{node.target}"
        elif node.op == "output":
            line = f"return {_text(node.args[0])}"
        else:
            raise _UnknownCodeError
        if (names := freed.get(node)) and node.op != "output":
            line += f";  {' = '.join(names)} = None"
        lines.append(f"    {line}\n")
        indices.append(index)
    head = graph._codegen.gen_fn_def(parameters, "")
    lineno_map: dict[int, int | None] = dict(enumerate([*indices, indices[-1]], start=1))
    return PythonCode(
        f"\n\n\n{head}\n{''.join(lines)}    ", outline.globals, lineno_map, outline._prologue_start
    )


def _check_names(nodes: list[fx.Node], reserved: set[str]) -> None:
    names = {node.name for node in nodes}
    if len(names) < len(nodes) or not names.isdisjoint(reserved) or not "".join(names).isascii():
        raise _UnknownCodeError
    if not all(map(str.isidentifier, names)) or any(node.type is not None for node in nodes):
        raise _UnknownCodeError


def _freed_after(nodes: list[fx.Node]) -> dict[fx.Node, list[str]]:
    """Returns the names of the values that are not read after each call after which there are some."""
    read: set[fx.Node] = set()
    freed = {}
    for node in reversed(nodes):
        inputs = node._input_nodes
        names = [] if read.issuperset(inputs) else [each.name for each in inputs if each not in read]
        if not node.users:
            names.append(node.name)
        if names:
            read.update(inputs)
            freed[node] = names
    return freed


def _call(target: Any) -> str:
    """Returns the name of an operator, or, of Python's own, a format of its arguments."""
    if isinstance(target, torch._ops.OpOverload):
        return _get_qualified_name(target)
    if getattr(target, "__module__", "") == "_operator" and target.__name__ in magic_methods:
        return magic_methods[target.__name__]
    raise _UnknownCodeError


def _call_text(call: str, node: fx.Node) -> str:
    args = [value.name if type(value) is fx.Node else _text(value) for value in node._args]
    if call in _OPERATORS:
        return call.format(*args)
    if kwargs := node._kwargs:
        args += [f"{name} = {_text(value)}" for name, value in kwargs.items()]
    return f"{call}({', '.join(args)})"


def _text(value: Any) -> str:
    kind = type(value)
    if kind is fx.Node:
        return str(value.name)
    if kind in _LITERALS:
        return repr(value)
    if isinstance(value, list):
        if _LITERALS.issuperset(map(type, value)):
            return list.__repr__(value)
        return f"[{', '.join([_text(each) for each in value])}]"
    if kind is tuple:
        return f"({', '.join([_text(each) for each in value])}{',' if len(value) == 1 else ''})"
    raise _UnknownCodeError
