"""Small questions about the nodes of a graph: what a call reads, launches or computes, what a constant holds."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import rebind_unbacked
from torch.multiprocessing.reductions import StorageWeakRef
from torch.types import py_sym_types

from graphpasses._torch.fake_calls import fake_call
from graphpasses._torch.fake_mode import fake_mode_of, is_fake, outside_tracing
from graphpasses._torch.gloo import ALL_GATHER
from graphpasses._torch.schemas import given_arguments, schemas, writes_arguments
from graphpasses._torch.storage import memories, times_written
from graphpasses.ops.reduce_in_tree import ALL_REDUCE_IN_TREE, REDUCE_SCATTER_IN_TREE

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

EXACT_REGION = "exact_region"
"""In ``meta`` of a node: the number of the region that it is a part of, which runs as one kernel."""

_SAME_AS_KEYS = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, fx.Node})

METADATA_OPS = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
    }
)
"""What reads a tensor's shape, not its values: also of what a collective will bring, before it is there."""

SAME_TENSOR_OPS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""What gives a tensor another name; where a trace of torch 2.13 has ``detach``, later ones have ``alias``."""

_COLLECTIVES = (
    ALL_GATHER,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    ALL_TO_ALL,
    torch.ops._c10d_functional.broadcast.default,
    REDUCE_SCATTER_IN_TREE,
    ALL_REDUCE_IN_TREE,
)


def argument(node: fx.Node, index: int = 0) -> fx.Node:
    """Returns the node that is an argument of a call."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` launches a functional collective."""
    return node.op == "call_function" and node.target in _COLLECTIVES


def collective_group(node: fx.Node) -> Any:
    """Returns the process group of the collective that an operator launches, as a rule its name; None for others."""
    names = group_names(node.target)
    given = given_arguments(node) if names else ()
    return next((value for argument, value in given if argument.name in names), None)


def find_collectives(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that launch a functional collective, by operator."""
    return [
        node for target in _COLLECTIVES for node in graph.find_nodes(op="call_function", target=target, sort=False)
    ]


@cache
def group_names(target: Any) -> frozenset[str]:
    """Returns what an operator calls its arguments that are process groups."""
    arguments = [argument for schema in schemas(target) for argument in schema.arguments]
    named = (each for each in arguments if each.name in ("group", "group_name", "process_group"))
    return frozenset(each.name for each in named if str(each.type) != "int")


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erases calls that nobody reads; as torch's own, but asks for side effects only where nobody reads."""
    unread = [node for node in graph.nodes if not node.users]
    while unread:
        node = unread.pop()
        if not _is_kept(node):
            sources = node.all_input_nodes
            graph.erase_node(node)
            unread += [source for source in sources if not source.users]


def _is_kept(node: fx.Node) -> bool:
    if node.target == WAIT:
        # torch marks waits as having side effects. One that nobody reads has none that a step could see, except that
        # where this rank ignores what an all-to-all brings, others do not.
        return argument(node).target == ALL_TO_ALL or argument(node).op == "placeholder"
    return node.is_impure()


def writing_operators(graph: fx.Graph) -> frozenset[str]:
    """Returns the names of the operators in a graph that write an argument, by their schemas."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    targets = {id(target): target for target in calls}  # by id: operators' hashes are slow
    return frozenset(str(target) for target in targets.values() if writes_arguments(target))


def wait_of(launch: fx.Node) -> fx.Node:
    """Returns the one wait of a collective, which the check between passes guarantees."""
    return next(user for user in launch.users if user.target == WAIT)


def freeze(value: Any) -> Hashable:
    """Returns a key for an argument of a call: ``1``, ``1.0`` and True have three, ``0.0`` and ``-0.0`` two.

    So have complex numbers of zeros of both signs.
    """
    if (kind := type(value)) in _SAME_AS_KEYS:
        return kind, value
    if isinstance(value, (list, tuple)):
        return tuple([(type(v), v) if type(v) in _SAME_AS_KEYS else freeze(v) for v in value])
    if isinstance(value, dict):
        return tuple((key, freeze(item)) for key, item in value.items())
    if isinstance(value, py_sym_types):  # which have no hash
        return type(value), value.node.expr
    if isinstance(value, complex):
        return type(value), (value.real.hex(), value.imag.hex())
    return type(value), value.hex() if isinstance(value, float) else value


def named_call(node: fx.Node) -> str:
    """Returns the operator of a call, and the line of the user's code that it comes from."""
    line = source_line(node)
    return f"{node.target} ({line})" if line else str(node.target)


def source_line(node: fx.Node) -> str:
    """Returns the line of the user's program from which a call comes, none of torch's own; empty if none is known."""
    lines = re.findall(r'File "(.+)", line (\d+), in (<?\w+>?)', node.meta.get("stack_trace") or "")
    own = [line for line in lines if not line[0].startswith(str(Path(torch.__file__).parent))]
    return "{}:{} in {}".format(*own[-1]) if own else ""


def _value(node: fx.Node) -> Any:
    value = node.meta["val"]
    # The tracer gives a constant of a sparse layout no fake value.
    return attribute(node) if value is None and node.op == "get_attr" else value


def fake_value(node: fx.Node) -> Any:
    """Returns the fake result of a call node, computed from its inputs' ``meta["val"]``."""
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    assert callable(node.target)
    if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]
    mode = fake_mode_of(args, kwargs)
    if mode is None and any(isinstance(each, torch.SymFloat) for each in args):  # which knows no mode
        mode = fake_mode_of([each.meta.get("val") for each in node.graph.find_nodes(op="placeholder")])
    if mode is None:
        return node.target(*args, **kwargs)
    if "unbacked_bindings" not in node.meta:
        return fake_call(mode, node.target, args, kwargs)
    # Computed again, a size that depends on data gets a new symbol, which names the same size.
    assert mode.shape_env is not None
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        value = node.target(*args, **kwargs)
    rebind_unbacked(mode.shape_env, node, value)
    return value


def refresh_values(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Computes again the fake values of what reads ``changed``, whose own are right."""
    behind = set(changed)
    for node in graph.nodes:
        reads_changed = not behind.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and node not in behind and reads_changed:
            node.meta["val"] = fake_value(node)
            behind.add(node)


def storages(*nodes: fx.Node) -> set[StorageWeakRef]:
    """Returns the memory of nodes' fake values, which overlapping inputs, and some operators, share unsaid."""
    return set[StorageWeakRef]().union(*(memories(node.meta.get("val")) for node in nodes))


def views(node: fx.Node) -> list[fx.Node]:
    """Returns the calls whose fake values lie in the memory of a node's, or of another of them, in graph order."""

    def viewing(read: fx.Node) -> list[fx.Node]:
        memory = storages(read)
        calls = (user for user in read.users if user.op == "call_function")
        return [call for call in calls if not memory.isdisjoint(storages(call))]

    return sorted(reach([node], viewing) - {node})


def is_empty(node: fx.Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in node.meta["val"].shape)


def last_reads(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the calls after which a node's memory is not read any more; of collectives their waits."""
    for each in (node, *views(node)):
        for user in each.users:
            if user.op == "call_function":
                yield wait_of(user) if is_collective(user) else user


def reach(start: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Returns the nodes that steps from a node to those that follow it lead to; where they start is among them."""
    found: set[fx.Node] = set()
    pending = list(start)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += following(node)
    return found


# Larger ones are known by what they are, and how often they were written: to read them takes seconds. Small ones show
# their bytes.
_MAX_BYTES = 1 << 28
_MAX_SHOWN = 1 << 8


def attribute(node: fx.Node) -> Any:
    """Returns what a ``get_attr`` node reads of its module."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def read_constants(graph: fx.Graph) -> dict[str, Hashable]:
    """Returns, by the names of a graph's attributes, what they hold now."""
    return {str(node.target): constant_bits(attribute(node)) for node in graph.find_nodes(op="get_attr")}


def constant_bits(value: Any) -> Hashable:
    """Returns a key of what a constant holds: equal keys are equal bits, of a graph equal calls and constants."""
    if isinstance(value, fx.GraphModule):
        code = value.graph.python_code("self").src  # of what it calls: its own is as old as its last recompilation
        called = {
            id(node.target if node.op == "call_function" else attribute(node)): None
            for node in value.graph.nodes
            if node.op in ("call_function", "call_module")
        }
        return code, tuple(called), tuple(read_constants(value.graph).items())
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not is_plain or is_fake(value) or value.is_meta or value.nbytes > _MAX_BYTES:
        return id(value), times_written(value)
    with outside_tracing():
        data = value.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        bits = data.tobytes() if data.nbytes <= _MAX_SHOWN else hashlib.sha256(data).hexdigest()
    return value.dtype, value.device, tuple(value.shape), value.stride(), bits
