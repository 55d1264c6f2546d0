"""What a mutator makes: an edit of one graph, which is applied to copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from graphpasses.graph import Stage, TrainGraph, fake_value, is_collective
from graphpasses.graph.known_values import summary
from graphpasses.graph.nodes import storages
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = [
    "Copy",
    "Edit",
    "MalformedError",
    "WrongPass",
    "alike",
    "calls",
    "insert_after",
    "reads",
    "tensors",
]


class MalformedError(Exception):
    """A mutant has a call that cannot run on its inputs: not a rewrite that anyone would ship."""


@dataclass(frozen=True)
class Copy:
    """A copy of the graph for which an edit was made.

    Args:
        graph: the copy.
        nodes: its nodes, by name.
    """

    graph: TrainGraph
    nodes: dict[str, fx.Node]

    def __getitem__(self, node: fx.Node) -> fx.Node:
        """Returns the copy's node for one of the original."""
        return self.nodes[node.name]

    def after(self, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call after a node of the copy."""
        with self.graph.graph.inserting_after(node):
            return self.graph.emit(target, args, kwargs, like=node)


def insert_after(copy: Copy, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Puts a call between a node of a copy and all that read it; its first argument is the node."""
    users = list(node.users)
    value = copy.after(node, target, node, *args, **kwargs)
    for user in users:
        user.replace_input_with(node, value)
    return value


@dataclass(frozen=True)
class Edit:
    """A wrong rewrite.

    Args:
        kind: what the table calls it.
        text: what it does, with the names of nodes.
        apply: does it to a copy of the graph for which it was made.
        rank: the one rank on which it is done; None for all.
    """

    kind: str
    text: str
    apply: Callable[[Copy], object]
    rank: int | None = None

    def rewrite(self, graph: TrainGraph) -> None:
        """Does it to a copy of the graph for which it was made, and computes the fake values that follow.

        Raises:
            MalformedError: a call cannot run on its inputs.
        """
        known = graph.watch_values()
        try:
            self.apply(Copy(graph, {node.name: node for node in graph.graph.nodes}))
        except RuntimeError as error:  # of the fake value of a new call
            raise MalformedError(f"{self.text}: {error}") from error
        changed = known.unknown(graph.graph)
        if graph.stage is not Stage.DYNAMO:  # whose methods have no fake values to compute
            _refresh(graph, set(changed))


@dataclass(frozen=True)
class WrongPass(GraphPass):
    """The pass that does an edit, as a user's pipeline would run it.

    Args:
        edit: what it does.
    """

    name: ClassVar[str] = "wrong"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    edit: Edit

    def rewrite(self, graph: TrainGraph) -> int:
        """Does the edit."""
        self.edit.rewrite(graph)
        return 1


def _refresh(graph: TrainGraph, changed: set[fx.Node]) -> None:
    """Computes fake values again: of changed calls, of what reads another kind of value, and of views."""
    for node in graph.graph.nodes:
        if node not in changed or node.op != "call_function":
            continue
        before = node.meta.get("val")
        memory = storages(node)
        try:
            node.meta["val"] = fake_value(node)
        except Exception as error:
            raise MalformedError(f"{node}: {error}") from error
        if _kind(before) != _kind(node.meta["val"]):
            changed.update(node.users)
        else:
            changed.update(user for user in node.users if not memory.isdisjoint(storages(user)))


def _kind(value: Any) -> Any:
    strides = [each.stride() for each in tensors(value)]
    return summary(value), summary(strides)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def calls(graph: TrainGraph) -> Iterator[fx.Node]:
    """Yields the calls of operators, or of functions."""
    return (node for node in graph.graph.nodes if node.op == "call_function")


def reads(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Returns the positional arguments of a call that are values, with their positions."""
    return [(index, arg) for index, arg in enumerate(node.args) if isinstance(arg, fx.Node)]


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have one tensor each, which a program cannot tell apart by shape, dtype and device."""
    values = one.meta.get("val"), other.meta.get("val")
    if is_collective(one) or is_collective(other):  # not there before they are waited for
        return False
    return all(isinstance(value, torch.Tensor) for value in values) and summary(values[0]) == summary(values[1])
