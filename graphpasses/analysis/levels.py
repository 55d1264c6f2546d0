"""Other orders of a ``DYNAMO`` graph's calls that compute the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch import pytree
from graphpasses._torch.torch_calls import (
    SET_GRAD_ENABLED,
    changes_context,
    draws_random_numbers,
    launches_collective,
    written_inputs,
)

__all__ = ["grad_modes", "has_gradient", "order_by_rank", "rank_calls"]

Predicate = Callable[[fx.Node], bool]

# Stands for the state of the random number generators, as if it were memory.
_RANDOM_STATE = object()


def rank_calls(graph: fx.Graph, *, odd: Predicate, in_turn: Predicate) -> dict[fx.Node, int]:
    """Returns a rank for each node, such that to sort the nodes by rank, stably, changes no value.

    The nodes that ``odd`` accepts get odd ranks, the others even ones; each as low as it can be. So two odd nodes of
    one rank do not depend on each other, and once sorted stand side by side. A node's rank is at least that of

    - its inputs, and higher where the input is odd or it is odd itself;
    - the last call before it that writes memory which it reads or writes (a call that writes also comes behind those
      that read), or that draws random numbers, if it does;
    - the last call before it through which a gradient comes to one of its inputs, since gradients are added in the
      order of the calls, if one comes through it, too;
    - every call before it, where one of the two changes the context (autocast), and
    - every collective before it, where ``in_turn`` accepts it.

    Args:
        graph: a graph that Dynamo traced, with ``meta["val"]``.
        odd: which calls get odd ranks.
        in_turn: which calls stay behind the collectives that they come behind.
    """
    ranks: dict[fx.Node, int] = {}
    # By memory; or by value, for the gradients that are added up for it.
    last_read: dict[object, int] = {}
    last_write: dict[object, int] = {}
    highest = lowest = of_collectives = 0
    for node in graph.nodes:
        written = set(_memory(written_inputs(node)))
        touched = set(_memory((node, *node.all_input_nodes)))
        if draws_random_numbers(node):
            written.add(_RANDOM_STATE)
        if has_gradient(node):
            written.update(
                other for other in node.all_input_nodes if len(other.users) > 1 and has_gradient(other)
            )
        touched |= written
        rank = max(
            lowest,
            *(ranks[other] + ranks[other] % 2 for other in node.all_input_nodes),
            *(last_write.get(key, 0) for key in touched),
            *(last_read.get(key, 0) for key in written),
            of_collectives if in_turn(node) else 0,
            highest if changes_context(node) else 0,
        )
        ranks[node] = rank = rank | 1 if odd(node) else rank + rank % 2
        highest = max(highest, rank)
        lowest = rank if changes_context(node) else lowest
        of_collectives = max(of_collectives, rank) if launches_collective(node) else of_collectives
        for key in touched:
            last_read[key] = max(last_read.get(key, 0), rank)
        last_write.update(dict.fromkeys(written, rank))
    return ranks


def has_gradient(node: fx.Node) -> bool:
    """Whether the value of a node, or a part of it, may have a gradient.

    Args:
        node: a node of a graph that Dynamo traced.
    """
    if "val" not in node.meta:  # a call that returns several values, or none
        return any(user.target is operator.getitem and has_gradient(user) for user in node.users)
    values = pytree.tree_leaves(node.meta["val"])
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _memory(nodes: Iterable[fx.Node]) -> Iterator[object]:
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def order_by_rank(graph: fx.Graph, ranks: dict[fx.Node, int]) -> None:
    """Sorts the nodes by rank; each call runs with gradients on or off as it did.

    Args:
        graph: the graph.
        ranks: what :func:`rank_calls` returned for it.
    """
    nodes = list(graph.nodes)
    end = max(ranks.values()) + 1
    ends = {"placeholder": -1, "output": end}
    ordered = sorted(nodes, key=lambda node: ends.get(node.op, ranks[node]))
    if ordered == nodes:
        return
    modes = grad_modes(graph)
    mode = torch.is_grad_enabled()
    last = None
    for node in ordered:
        if node.target is SET_GRAD_ENABLED:
            graph.erase_node(node)
            continue
        if last is not None:
            last.append(node)
        if node.op in ("call_function", "call_method", "output") and modes[node] != mode:
            mode = modes[node]
            with graph.inserting_before(node):
                graph.call_function(SET_GRAD_ENABLED, (mode,)).meta["val"] = None
        last = node


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Returns for each node whether gradients are on where it runs.

    Args:
        graph: a graph that Dynamo traced, in the mode in which it will be called.
    """
    mode = torch.is_grad_enabled()
    modes = {}
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = bool(node.args[0])
        modes[node] = mode
    return modes
