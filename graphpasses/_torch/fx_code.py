"""The code of large FX graphs: torch's own, word for word, in a third of its time, and a shorter one to compile.

torch asks for the name of a node wherever it stands in the code, and for that of an operator at every call. Its code
looks up four attributes at every call, ``torch.ops.aten.mm.default``, which Python compiles for longer than the rest
of the call. What is compiled calls ``aten_mm_default``, a global name.
"""

from __future__ import annotations

import builtins
import keyword
import os
import re
from typing import Any

import torch
from torch import fx

# _get_qualified_name: under which name code calls an operator. Tested: 2.13.
from torch.fx.graph import CodeGen, PythonCode, magic_methods
from torch.fx.node import Node, _get_qualified_name

__all__ = ["quick_code", "short_code", "torchs_text"]

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
_CALL = re.compile(r"^(    \w+ = )(\w+)(?=\()", re.MULTILINE)


class _UnknownCodeError(Exception):
    """Torch has to generate the code."""


def quick_code(graph: fx.Graph, root_module: str) -> PythonCode | None:
    """Returns the code of a graph that calls operators on nodes and numbers; None of any other.

    Args:
        graph: the graph.
        root_module: what the code calls its module.
    """
    if (code := short_code(graph, root_module)) is None:
        return None
    names = {name: value for name, value in code.globals.items() if not _is_operator(value)}
    return PythonCode(torchs_text(code), names, code._lineno_map, code._prologue_start)


def short_code(graph: fx.Graph, root_module: str) -> PythonCode | None:
    """Returns the same code, line by line, whose operators are global names; None where :func:`quick_code` does.

    Args:
        graph: the graph.
        root_module: what the code calls its module.
    """
    codegen: Any = graph._codegen
    is_plain = type(codegen) is CodeGen and codegen._body_transformer is None
    if not is_plain or os.environ.get("FX_GRAPH_SHOW_META", "0") != "0":
        return None
    try:
        return _short_code(graph, root_module)
    except _UnknownCodeError:
        return None


def torchs_text(code: PythonCode) -> str:
    """Returns the text that torch has for a code.

    Args:
        code: any, e.g. what :func:`short_code` returns.
    """
    paths = {name: _get_qualified_name(value) for name, value in code.globals.items() if _is_operator(value)}
    return _CALL.sub(lambda call: call[1] + paths.get(call[2], call[2]), code.src)


def _short_code(graph: fx.Graph, root_module: str) -> PythonCode:
    nodes = [*graph.nodes]
    if not nodes or nodes[-1].op != "output":
        raise _UnknownCodeError
    empty = fx.Graph()
    empty.output(())
    outline = empty.python_code(root_module)  # has the global names that all code has
    calls: dict[int, str] = {}  # by id: operators' hashes take as long as all else
    operators: dict[str, Any] = {}
    parameters: list[str] = []
    lines: list[str] = []
    indices: list[int] = []
    read: set[fx.Node] = set()  # by what follows: each value is freed where it is read last
    for index, node in zip(range(len(nodes) - 1, -1, -1), reversed(nodes), strict=True):
        op = node.op
        if op == "placeholder":
            if node.args or node.target != node.name:
                raise _UnknownCodeError
            parameters.append(node.name)
            continue
        if op == "call_function" and "is_wrapped" not in node.meta:
            if (call := calls.get(id(node.target))) is None:
                call = calls[id(node.target)] = _call(node.target, operators)
            line = f"{node.name} = {_call_text(call, node)}"
        elif op == "get_attr" and all(map(str.isidentifier, node.target.split("."))):
            line = f"{node.name} = {root_module}.{node.target}"
        elif op == "output":
            line = f"return {_text(node.args[0])}"
        else:
            raise _UnknownCodeError
        inputs = node._input_nodes
        unread = [] if read.issuperset(inputs) else [each.name for each in inputs if each not in read]
        read.update(inputs)
        if not node.users:
            unread.append(node.name)
        if unread and op != "output":
            line += f";  {' = '.join(unread)} = None"
        lines.append(f"    {line}\n")
        indices.append(index)
    _check_names(nodes, {root_module, *outline.globals, *operators, *keyword.kwlist, *dir(builtins)})
    head = graph._codegen.gen_fn_def(parameters[::-1], "")
    lineno_map: dict[int, int | None] = dict(enumerate([*indices[::-1], indices[0]], start=1))
    return PythonCode(
        f"\n\n\n{head}\n{''.join(lines[::-1])}    ",
        outline.globals | operators,
        lineno_map,
        outline._prologue_start,
    )


def _check_names(nodes: list[fx.Node], reserved: set[str]) -> None:
    names = {node.name for node in nodes}
    if len(names) < len(nodes) or not names.isdisjoint(reserved) or not "".join(names).isascii():
        raise _UnknownCodeError
    if not all(map(str.isidentifier, names)) or any(node.type is not None for node in nodes):
        raise _UnknownCodeError


def _call(target: Any, operators: dict[str, Any]) -> str:
    """Returns the name of an operator, which is added to the others; of Python's own, a format of its arguments."""
    if _is_operator(target):
        name = _get_qualified_name(target).removeprefix("torch.ops.").replace(".", "_")
        if operators.setdefault(name, target) is not target:
            raise _UnknownCodeError
        return name
    if getattr(target, "__module__", "") == "_operator" and target.__name__ in magic_methods:
        return magic_methods[target.__name__]
    raise _UnknownCodeError


def _is_operator(value: Any) -> bool:
    return isinstance(value, torch._ops.OpOverload)


def _call_text(call: str, node: fx.Node) -> str:
    args = [value.name if type(value) is Node else _text(value) for value in node._args]
    if call in _OPERATORS:
        return call.format(*args)
    if kwargs := node._kwargs:
        args += [f"{name} = {_text(value)}" for name, value in kwargs.items()]
    return f"{call}({', '.join(args)})"


def _text(value: Any) -> str:
    kind = type(value)
    if kind is Node:
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
