"""What a call in a graph does beside computing its value: memory, random numbers, communication, context.

One description, :class:`Effects`, and two readers of it: :func:`operator_effects` for graphs of ATen operators, which
AOTAutograd and ``make_fx`` make, and :func:`torch_call_effects` for the torch-level calls of Dynamo's graphs. What
depends on what follows from it, see :mod:`graphpasses.analysis.dependencies`.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.types import py_sym_types

from graphpasses._torch import pytree
from graphpasses._torch.schemas import (
    SET_GRAD_ENABLED,
    draws,
    given_arguments,
    has_schemas,
    is_higher_order,
    is_operator,
    is_seeded,
    is_tensor_subclass,
    random_names,
    returns_alias,
    schemas,
    writes_arguments,
    written_names,
)
from graphpasses.graph import WAIT
from graphpasses.graph.nodes import METADATA_OPS, attribute, collective_group, group_names, reach, storages

aten = torch.ops.aten

UNKNOWN_GROUP = "unknown"

# These replace an operator that writes, and return copies instead.
_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)

_IN_PLACE_OPERATORS = frozenset(
    {"setitem", "delitem"}
    | {name for name in dir(operator) if name[0] == "i" and {name[1:], f"{name[1:]}_"} & {*dir(operator)}}
)

# What functions of Python write, and the argument that has them do so.
_WRITTEN_IF = (
    *itertools.product(("running_mean", "running_var"), ("training", "use_input_stats")),
    ("weight", "max_norm"),
)

# Whose functions do no more than their names say.
_KNOWN_MODULES = ("torch", "_operator", "math", "builtins", "graphpasses")

# What functions may say of a tensor; and what may change when a method of it is called.
_FACTS = (int, float, complex, torch.dtype, torch.device, *py_sym_types)
_OBJECTS = (torch.Tensor, torch.nn.Module, torch.Generator, list, dict, set)

# Public functions that draw random numbers under another name than the operator that does.
_RANDOM_FUNCTIONS = frozenset({"gumbel_softmax", "multi_head_attention_forward", "fractional_max_pool"})


@dataclass(frozen=True)
class Effects:
    """What a call does beside computing its value."""

    # The inputs whose values it reads; not those whose shape it asks, or of which it makes a view.
    reads: tuple[fx.Node, ...] = ()
    writes: tuple[fx.Node, ...] = ()  # the inputs that it may write in place
    # The inputs with which its value may share memory, also where fake values do not show it.
    shares: tuple[fx.Node, ...] = ()
    # The inputs that get gradients from several calls, this one among them: they are added in the order of
    # the calls.
    gradients: tuple[fx.Node, ...] = ()
    # Whether it may depend on earlier calls by more than its inputs, as random numbers do.
    has_hidden_state: bool = False
    # Whether it is made for what it changes around the calls after it, such as autocast.
    changes_context: bool = False
    # The process group on which it communicates, as a rule its name; :data:`UNKNOWN_GROUP` where that does
    # not show; None if it does not communicate.
    group: object = None


# ---- the two readers ----------------------------------------------------------------------------------------------


def operator_effects(node: fx.Node) -> Effects:
    """Returns what an ATen graph's node does; other libraries' writing operators are taken to have a state."""
    if node.op != "call_function":
        return Effects()
    return Effects(
        reads=_read_inputs(node),
        writes=written_inputs(node),
        shares=tuple(_shared_inputs(node)),
        has_hidden_state=has_hidden_state(node),
        group=collective_group(node),
    )


def torch_call_effects(node: fx.Node) -> Effects:
    """Returns what a node of a graph that Dynamo traced does, as torch's conventions tell (``add_``, ``out=``)."""
    with_gradient = filter(has_gradient, node.all_input_nodes if has_gradient(node) else ())
    return Effects(
        reads=tuple(node.all_input_nodes),
        writes=written_inputs(node),
        gradients=tuple(each for each in with_gradient if len(each.users) > 1),
        has_hidden_state=draws_random_numbers(node),
        changes_context=changes_context(node),
        group=_torch_call_group(node),
    )


# ---- memory -------------------------------------------------------------------------------------------------------


def holds_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is or contains a tensor: only these have memory."""
    return any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta.get("val")))


def is_written(node: fx.Node) -> bool:
    """Whether an operator writes the memory of a node, or of a view of it."""

    def calls(value: fx.Node) -> Iterator[fx.Node]:
        return (user for user in value.users if user.op == "call_function")

    values = reach([node], lambda value: [user for user in calls(value) if value in _shared_inputs(user)])
    return any(value in written_inputs(user) for value in values for user in calls(value))


def written_memory(graph: fx.Graph) -> set[StorageWeakRef]:
    """Returns the memory that calls of a graph may write in place."""
    return storages(*(each for node in graph.nodes for each in written_inputs(node)))


def names_written(node: fx.Node) -> frozenset[str]:
    written = written_names(node.target)
    if written and str(node.target).startswith("aten._fused_") and node.kwargs.get("grad_scale") is None:
        return written - {"grads"}  # torch's kernels scale gradients back in place, or leave them
    return written


@cache
def is_elementwise_on_lists(target: Any) -> bool:
    """Whether an operator does with each element of its lists of tensors what it does with that alone."""
    if not is_operator(target) or not str(target).startswith(("aten._foreach_", "aten._fused_")):
        return False
    (schema,) = schemas(target)
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    return "List[Tensor]" in types.values() and types.get("scalars") != "Tensor" and len(schema.returns) < 2


def written_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the inputs that a call may write in place."""
    if node.target is operator.getitem:  # of calls without a schema, nearly all
        return ()
    if has_schemas(node.target):
        if not (written := names_written(node)):
            return ()
        return tuple(nodes_in([value for argument, value in given_arguments(node) if argument.name in written]))
    if is_higher_order(node) or is_unknown(node):
        return () if node.target in _FUNCTIONALIZED else tuple(node.all_input_nodes)  # it does not say
    if node.op not in ("call_function", "call_method"):
        return ()
    is_in_place = _is_in_place(node.target) or _named_argument(node, "inplace")
    named = {name for name, switch in _WRITTEN_IF if _named_argument(node, switch)} | written_names(_packet(node))
    others = [_named_argument(node, name) for name in sorted({"out", *named})]
    return tuple(dict.fromkeys(nodes_in([*(node.args[:1] if is_in_place else ()), *others])))


def _shared_inputs(node: fx.Node) -> Iterator[fx.Node]:
    if node.target in (operator.getitem, WAIT):
        yield from node.all_input_nodes[:1]
    elif is_higher_order(node):
        yield from node.all_input_nodes
    elif returns_alias(node.target):
        yield from nodes_in([value for argument, value in given_arguments(node) if argument.alias_info])


def _read_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    if node.target in METADATA_OPS or is_view(node):
        return ()
    if node.target is aten.copy_.default:
        return tuple(nodes_in([value for argument, value in given_arguments(node) if argument.name == "src"]))
    return tuple(node.all_input_nodes)


def is_view(node: fx.Node) -> bool:
    """Whether a call makes a tensor without reading values (``reshape`` may copy)."""
    is_view = node.target is operator.getitem or getattr(node.target, "is_view", False)
    return is_view and storages(node) <= storages(*node.all_input_nodes[:1])


def _is_in_place(target: Any) -> bool:
    name = _name(target)
    if getattr(target, "__module__", "") == "_operator":
        return name in _IN_PLACE_OPERATORS
    if name.startswith("__"):
        return name.strip("_") in _IN_PLACE_OPERATORS
    return name.endswith("_")


# ---- what is checked -----------------------------------------------------------------------------------------------


def is_check(node: fx.Node) -> bool:
    """Whether a call is made for the error that it may raise: it returns and writes nothing."""
    return _checks(node.target) if has_schemas(node.target) else _is_check_by_name(node)


@cache
def _checks(target: Any) -> bool:
    is_for_profiler = str(target).startswith("profiler.")
    return not any(each.returns or each.is_mutable for each in schemas(target)) and not is_for_profiler


def _is_check_by_name(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node.target).startswith(("_assert", "_check"))


# ---- gradients and random numbers ---------------------------------------------------------------------------------


def has_hidden_state(node: fx.Node) -> bool:
    """Whether an operator may depend on earlier calls by more than its inputs."""
    namespace = getattr(node.target, "namespace", "aten")
    writes = namespace != "aten" and writes_arguments(node.target)
    counts = namespace not in ("aten", "graphpasses") and is_check(node)  # for all that is known of it
    return is_higher_order(node) or draws_random_numbers(node) or writes or counts


def is_unknown(node: fx.Node) -> bool:
    """Whether a call may write, draw, and keep a state: of a function that is neither torch's nor Python's, of a
    method of something that the graph does not show, and one that makes nothing of what it is given.
    """
    if node.op not in ("call_function", "call_method") or is_higher_order(node) or has_schemas(node.target):
        return False
    module = getattr(node.target, "__module__", None) or "torch"
    is_bound = isinstance(getattr(node.target, "__self__", None), _OBJECTS)
    is_known = module.partition(".")[0] in _KNOWN_MODULES and not is_bound
    is_named = _is_in_place(node.target) or _is_check_by_name(node) or node.target is SET_GRAD_ENABLED
    does_more = node.target is operator.call or not (is_named or _makes_value(node) or changes_context(node))
    return not is_known or does_more


def says_nothing(node: fx.Node) -> bool:
    """Whether a call does not say what it returns."""
    return node.op in ("call_function", "call_method") and "val" not in node.meta


def is_for_effect(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graphs is made for something that does not show: nobody reads what it returns."""
    shows = has_schemas(node.target) or is_check(node) or changes_context(node) or written_inputs(node)
    return says_nothing(node) and not node.users and not shows and node.target is not SET_GRAD_ENABLED


def is_pythons(node: fx.Node) -> bool:
    """Whether a call is of an operator of Python, which takes something apart, or computes a number."""
    return getattr(node.target, "__module__", "") in ("math", "_operator") and node.target is not operator.call


def _makes_value(node: fx.Node) -> bool:
    """Whether a call returns tensors, or facts about what it is given; of several the graph may not show any."""
    if says_nothing(node) or is_pythons(node):
        return bool(node.all_input_nodes) or not says_nothing(node)
    kinds = (torch.Tensor, *(_FACTS if node.all_input_nodes else ()))
    return any(isinstance(value, kinds) for value in pytree.tree_leaves(node.meta["val"]))


def has_gradient(node: fx.Node) -> bool:
    """Whether the value of a node, or a part of it, may have a gradient."""
    if "val" not in node.meta:  # a call that returns several values, or none
        return any(user.target is operator.getitem and has_gradient(user) for user in node.users)
    values = pytree.tree_leaves(node.meta["val"])
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def reached_outputs(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Returns, of each value that may get a gradient, the positions of the outputs from which it comes."""
    reached: dict[fx.Node, frozenset[int]] = defaultdict(frozenset)
    for node in reversed(graph.nodes):
        if node.op == "output":
            for position, value in enumerate(node.args[0]):
                if isinstance(value, fx.Node) and has_gradient(value):
                    reached[value] |= {position}
        elif node in reached:
            for value in filter(has_gradient, node.all_input_nodes):
                reached[value] |= reached[node]
    return {node: reached[node] for node in sorted(reached)}


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call, or one inside of the graphs that it is given, may draw random numbers."""
    if is_operator(node.target):
        return draws(node)
    if is_higher_order(node):
        return any(map(is_seeded, node.args)) or any(map(draws_random_numbers, _inner_nodes(node)))
    if is_unknown(node):
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node.target).rstrip("_")
    return any(each in names for each in (name, name.rstrip("123d")) for names in (random_names(), _RANDOM_FUNCTIONS))


# ---- communication and context ------------------------------------------------------------------------------------


def launches_collective(node: fx.Node) -> bool:
    """Whether a torch-level call, or one inside the graphs that it is given, communicates."""
    return _torch_call_group(node) is not None


def _torch_call_group(node: fx.Node) -> object:
    if is_higher_order(node):
        return next((group for inner in _inner_nodes(node) if (group := _torch_call_group(inner))), None)
    if has_schemas(node.target):
        return collective_group(node) or UNKNOWN_GROUP if group_names(node.target) else None
    if node.op not in ("call_function", "call_method"):
        return None
    values = pytree.tree_leaves([other.meta.get("val") for other in (node, *node.all_input_nodes)])
    return UNKNOWN_GROUP if any(map(is_tensor_subclass, values)) else None  # DTensor may communicate


def changes_context(node: fx.Node) -> bool:
    """Whether a call computes nothing: it is made for what it changes around the calls after it."""
    if node.op != "call_function" or node.target is SET_GRAD_ENABLED or is_operator(node.target):
        return False
    is_known = not says_nothing(node) and _makes_value(node)
    return not is_known and all(map(changes_context, node.all_input_nodes))


# ---- reading nodes ------------------------------------------------------------------------------------------------


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _named_argument(node: fx.Node, name: str) -> Any:
    """Returns an argument of a function, its default if it is not given; None where the function has none."""
    if name in node.kwargs:
        return node.kwargs[name]
    defaults = _defaults(_packet(node) or node.target)
    place = [*defaults].index(name) if name in defaults else len(node.args)
    return node.args[place] if place < len(node.args) else defaults.get(name)


def _packet(node: fx.Node) -> Any:
    """Returns the operator of a function of torch's own; None for others."""
    name = _name(node.target)
    is_own = node.op == "call_function" and name and getattr(torch, name, None) is node.target
    return getattr(aten, name, None) if is_own and not inspect.isfunction(node.target) else None


@cache
def _defaults(target: Any) -> dict[str, Any]:
    if found := schemas(target):
        return {argument.name: argument.default_value for argument in found[0].arguments}
    parameters = inspect.signature(target).parameters.values() if inspect.isfunction(target) else ()
    return {each.name: None if each.default is each.empty else each.default for each in parameters}


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    for other in node.all_input_nodes:
        if other.op == "get_attr" and isinstance(module := attribute(other), fx.GraphModule):
            yield from module.graph.nodes


def nodes_in(value: Any) -> list[fx.Node]:
    """Returns the nodes among a call's arguments, as often as they stand there."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found
