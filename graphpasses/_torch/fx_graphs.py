"""Large FX graphs: copies, parts, and modules that generate code when they are first run.

The code is torch's own, word for word; torch asks for the name of a node wherever it stands in the code, and for that
of an operator at every call.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import os
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen, PythonCode, magic_methods
from torch.fx.node import Node, _get_qualified_name

from graphpasses._torch.module_hooks import hook_ids
from graphpasses.errors import BatchMismatchError
from graphpasses.gc_pause import paused_gc

_LITERALS = frozenset(
    {bool, float, int, str, torch.device, torch.dtype, torch.layout, torch.memory_format, type(None)}
)
_OPERATORS = frozenset(magic_methods.values())


def qualified_name(target: Callable[..., Any]) -> str:
    """Returns what code calls; torch writes the keyword in ``aten.random_.from``, which is no code."""
    owner, _, name = (written := _get_qualified_name(target)).rpartition(".")
    return f"getattr({owner}, {name!r})" if keyword.iskeyword(name) else written


fx.graph._get_qualified_name = qualified_name  # type: ignore[assignment,attr-defined]  # of all graphs


class _UnknownCodeError(Exception):
    """Torch has to generate the code."""


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Returns a graph of new nodes with the names of the old, which share the values of their metadata; its code is
    that of flat arguments.
    """
    result = fx.Graph()
    result.output(result.graph_copy(source, {})).meta.update(source.output_node().meta)
    return result


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a module of a copied graph, with copies of the graphs that it calls; tensors are shared."""
    result = lazy_module(module, copy_graph(module.graph))
    for name, called in [*result.named_children()]:
        if isinstance(called, fx.GraphModule):
            setattr(result, name, copy_module(called))
    return result


def lazy_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that generates its code when it is first called, or printed; ``root`` holds what it reads."""
    return _LazyModule(root, graph)


def generate_code(module: fx.GraphModule) -> None:
    """Generates what a module of :func:`lazy_module` runs, as its first call does; any other has it."""
    _LazyGraphModule.force_recompile(module)


def extracted(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[Any], name: str) -> fx.GraphModule:
    """Returns the part of a graph that computes outputs of inputs, and what writes in place in it, as torch cuts it.

    ``name`` is that of the part, for torch's errors. Waits are in it where an output needs them.
    """
    from torch._functorch.partitioners import _extract_graph_with_inputs_outputs  # which imports Dynamo

    unknown: Any = [None] * len(outputs)
    wait = torch.ops._c10d_functional.wait_tensor
    kept = fx.node._side_effectful_functions - {wait, wait.default}
    with mock.patch.object(fx.node, "_side_effectful_functions", kept):
        graph = _extract_graph_with_inputs_outputs(
            module.graph, list(inputs), list(outputs), unknown, name, ignore_must_be_in_fw_bw=True
        )
    return fx.GraphModule(module, graph)


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
            if not isinstance(error, (torch.OutOfMemoryError, BatchMismatchError)):
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
        code = _python_code(module.graph, "self")
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

    def _real_recompile(self) -> PythonCode:
        code = functools.partial(_python_code, self.graph)
        with paused_gc(), mock.patch.object(self.graph, "python_code", code):
            return super()._real_recompile()


def _python_code(graph: fx.Graph, root_module: str, **options: Any) -> PythonCode:
    code = None if any(options.values()) else quick_code(graph, root_module)
    return fx.Graph.python_code(graph, root_module, **options) if code is None else code


def runs_as_written(module: fx.GraphModule) -> bool:
    """Whether a call runs what the graph says: no code that others generate, and no hooks around it."""
    return _has_plain_code(module.graph) and not hook_ids(module)


def _has_plain_code(graph: fx.Graph) -> bool:
    codegen: Any = graph._codegen
    return type(codegen) is CodeGen and codegen._body_transformer is None


def quick_code(graph: fx.Graph, root_module: str) -> PythonCode | None:
    """Returns the code, in a module of this name, of a graph of operators on nodes and numbers; None of another."""
    if not _has_plain_code(graph) or os.environ.get("FX_GRAPH_SHOW_META", "0") != "0":
        return None
    try:
        return _quick_code(graph, root_module)
    except _UnknownCodeError:
        return None


def _quick_code(graph: fx.Graph, root_module: str) -> PythonCode:
    nodes = [*graph.nodes]
    if not nodes or nodes[-1].op != "output":
        raise _UnknownCodeError
    empty = fx.Graph()
    empty.output(())
    outline = empty.python_code(root_module)  # has the global names that all code has
    calls: dict[int, str] = {}  # by id: operators' hashes take as long as all else
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
                call = calls[id(node.target)] = _call(node.target)
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
    _check_names(nodes, {root_module, *outline.globals, *keyword.kwlist, *dir(builtins)})
    head = graph._codegen.gen_fn_def(parameters[::-1], "")
    lineno_map: dict[int, int | None] = dict(enumerate([*indices[::-1], indices[0]], start=1))
    return PythonCode(
        f"\n\n\n{head}\n{''.join(lines[::-1])}    ", outline.globals, lineno_map, outline._prologue_start
    )


def _check_names(nodes: list[fx.Node], reserved: set[str]) -> None:
    names = {node.name for node in nodes}
    if len(names) < len(nodes) or not names.isdisjoint(reserved) or not "".join(names).isascii():
        raise _UnknownCodeError
    if not all(map(str.isidentifier, names)) or any(node.type is not None for node in nodes):
        raise _UnknownCodeError


def _call(target: Any) -> str:
    """Returns what code calls an operator; of Python's own, a format of its arguments."""
    if isinstance(target, torch._ops.OpOverload):
        return qualified_name(target)
    if getattr(target, "__module__", "") == "_operator" and target.__name__ in magic_methods:
        return magic_methods[target.__name__]
    raise _UnknownCodeError


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
