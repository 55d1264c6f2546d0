"""What the torch-level calls of a graph that Dynamo traced do beside computing their value."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphpasses._torch import pytree

__all__ = [
    "SET_GRAD_ENABLED",
    "changes_context",
    "draws_random_numbers",
    "is_higher_order",
    "launches_collective",
    "named_arguments",
    "written_inputs",
]

SET_GRAD_ENABLED = torch._C._set_grad_enabled

_GROUPS = ("group", "group_name", "process_group")  # what collectives call their group
_IN_PLACE_OPERATORS = frozenset(
    {"setitem", "delitem"}
    | {name for name in dir(operator) if name[0] == "i" and {name[1:], f"{name[1:]}_"} & {*dir(operator)}}
)
# Public functions that draw random numbers under another name than the operator that does.
_RANDOM_FUNCTIONS = frozenset({"gumbel_softmax", "multi_head_attention_forward", "fractional_max_pool"})


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of an operator that has one overload, defaults too, by their names."""
    (schema,) = _schemas(node.target)
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return defaults | dict(zip(names, node.args, strict=False)) | node.kwargs


def is_higher_order(node: fx.Node) -> bool:
    """Whether a call is given graphs to run, as that of an ``autograd.Function`` is."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def written_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the inputs that a call may write in place; a higher-order operator does not say, so it may write all."""
    target = node.target
    if is_higher_order(node):
        yield from node.all_input_nodes
    elif schemas := _schemas(target):
        for schema in schemas:
            for index, argument in enumerate(schema.arguments):
                if argument.is_write:
                    value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                    yield from _nodes(value)
    elif node.op in ("call_function", "call_method"):
        yield from _nodes(node.kwargs.get("out"))
        if _is_in_place(target) or _argument(node, "inplace"):
            yield from _nodes(node.args[:1])


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call, or one inside the graphs that it is given, draws random numbers."""
    target = node.target
    if is_higher_order(node):
        return any(map(draws_random_numbers, _inner_nodes(node)))
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(target).rstrip("_")
    return name in _random_names() or name.rstrip("123d") in _random_names()


def launches_collective(node: fx.Node) -> bool:
    """Whether a call, or one inside the graphs that it is given, communicates; any call on a DTensor may."""
    target = node.target
    if is_higher_order(node):
        return any(map(launches_collective, _inner_nodes(node)))
    if schemas := _schemas(target):
        arguments = (argument for schema in schemas for argument in schema.arguments)
        return any(argument.name in _GROUPS and str(argument.type) != "int" for argument in arguments)
    return any(
        is_traceable_wrapper_subclass(value)
        for other in (node, *node.all_input_nodes)
        for value in pytree.tree_leaves(other.meta.get("val"))
        if node.op in ("call_function", "call_method")
    )


def changes_context(node: fx.Node) -> bool:
    """Whether a call computes nothing: it is made for what it changes around the calls behind it (autocast, say)."""
    if node.op != "call_function" or node.target is SET_GRAD_ENABLED:
        return False
    values = pytree.tree_leaves(node.meta.get("val"))
    return all(value is None for value in values) and all(map(changes_context, node.all_input_nodes))


def _schemas(target: Any) -> list[Any]:
    match target:
        case torch._ops.OpOverload():
            return [target._schema]
        case torch._ops.OpOverloadPacket():
            return [overload._schema for overload in _overloads(target)]
    return []


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_in_place(target: Any) -> bool:
    name = _name(target)
    if getattr(target, "__module__", "") == "_operator":
        return name in _IN_PLACE_OPERATORS
    if name.startswith("__"):
        return name.strip("_") in _IN_PLACE_OPERATORS
    return name.endswith("_")


def _argument(node: fx.Node, name: str) -> Any:
    if name in node.kwargs or not inspect.isfunction(node.target):
        return node.kwargs.get(name)
    names = list(inspect.signature(node.target).parameters)
    return node.args[names.index(name)] if name in names and names.index(name) < len(node.args) else None


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    for other in node.all_input_nodes:
        if other.op == "get_attr" and isinstance(module := _attribute(other), fx.GraphModule):
            yield from module.graph.nodes


def _attribute(node: fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _nodes(value: Any) -> Iterator[fx.Node]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


@cache
def _random_names() -> frozenset[str]:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = [getattr(torch.ops.aten, name[6:]) for name in names if name.startswith("aten::")]
    random = {
        _name(packet).rstrip("_")
        for packet in packets
        if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(packet))
    }
    return _RANDOM_FUNCTIONS | random
