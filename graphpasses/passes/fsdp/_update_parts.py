"""Parts of an update: which parameter each call of it is for, and those calls again in a step's own graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphpasses.analysis.effects import is_elementwise_on_lists
from graphpasses.graph import InputKind, TrainGraph
from graphpasses.graph.train_graph import add_update_input
from graphpasses.graph.update import Update


@dataclass(frozen=True)
class Group:
    """Parameters that are updated together."""

    fqns: frozenset[str]
    # The call after which their gradients are there, and nothing reads the parameters any more.
    anchor: fx.Node


def owners_of(update: Update) -> dict[fx.Node, Any] | str:
    """Returns the parameter for which each call of an update computes, of several results a list; None: for all.

    A string says which call needs several parameters at once.
    """
    owners: dict[fx.Node, Any] = {}
    placeholders = update.module.graph.find_nodes(op="placeholder")
    for item, node in zip(update.inputs, placeholders, strict=True):
        owners[node] = None if item.kind is InputKind.HYPERPARAMETER else item.fqn
    for node in update.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem:
            owners[node] = owners[node.args[0]][node.args[1]]
            continue
        lists = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (list, tuple))]
        if lists and is_elementwise_on_lists(node.target):
            length = max(map(len, lists))
            owners[node] = [_owner([each[index] for each in lists if each], owners) for index in range(length)]
            owner = _owner([value for value in node.args if isinstance(value, fx.Node)], owners)
            if owner is not None or any(each is ... for each in owners[node]):
                return str(node.target)
            continue
        owners[node] = _owner(node.all_input_nodes, owners)
        if owners[node] is ...:
            return str(node.target)
    return owners


def _owner(values: Sequence[Any], owners: Mapping[fx.Node, Any]) -> Any:
    """Returns the parameter that values belong to; None: to none, ``...``: to several."""
    found = {owners[value] for value in values if isinstance(value, fx.Node)} - {None}
    return ... if len(found) > 1 else next(iter(found), None)


@dataclass
class Emitter:
    """Puts parts of an update into a step's graph."""

    graph: TrainGraph
    update: Update
    owners: Mapping[fx.Node, Any]  # the parameter for which each call of the update computes
    # By the update's nodes those of the step; what all parameters share is made once.
    made: dict[fx.Node, fx.Node]
    # By a call of the update that returns several values, where each is among those of the last call made.
    places: dict[fx.Node, dict[int, int]] = field(default_factory=dict)

    def emit(self, group: Group) -> None:
        """Emits the update of some parameters after their anchor."""
        with self.graph.graph.inserting_before(group.anchor.next):
            for node in self.update.module.graph.nodes:
                owner = self.owners.get(node)
                if node.op in ("placeholder", "output") or (owner is None and node in self.made):
                    continue
                if node.op == "get_attr":
                    self.made[node] = self._constant(node)
                elif isinstance(owner, list):
                    self._emit_part(node, group, [index for index, fqn in enumerate(owner) if fqn in group.fqns])
                elif node.target is operator.getitem and owner in group.fqns:
                    source, index = node.args
                    args = (self.made[source], self.places[source][index])
                    self.made[node] = self.graph.emit(operator.getitem, args, like=group.anchor)
                elif owner is None or owner in group.fqns:
                    self._emit_call(node, node.args, node.kwargs, group)

    def _emit_part(self, node: fx.Node, group: Group, kept: list[int]) -> None:
        """Emits a call on those elements of its lists that belong to the group."""

        def part(value: Any) -> Any:
            return [value[index] for index in kept] if isinstance(value, (list, tuple)) and value else value

        if kept:
            self.places[node] = {index: place for place, index in enumerate(kept)}
            kwargs = {name: part(value) for name, value in node.kwargs.items()}
            self._emit_call(node, tuple(map(part, node.args)), kwargs, group)

    def _emit_call(self, node: fx.Node, args: Any, kwargs: Any, group: Group) -> None:
        args, kwargs = fx.node.map_arg((args, kwargs), self.made.__getitem__)
        self.made[node] = self.graph.emit(node.target, tuple(args), kwargs, like=group.anchor)  # type: ignore[arg-type]

    def _constant(self, node: fx.Node) -> fx.Node:
        name = f"update{node.target}"
        setattr(self.graph.module, name, getattr(self.update.module, str(node.target)))
        made = self.graph.graph.create_node("get_attr", name)
        made.meta.update(node.meta)
        return made


def add_inputs(graph: TrainGraph, update: Update, gradients: Mapping[str, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Adds the optimizer's inputs to a step; returns the step's nodes of all inputs of the update."""
    stored = dict(graph.parameter_placeholders())
    made: dict[fx.Node, fx.Node] = {}
    for item, node in zip(update.inputs, update.module.graph.find_nodes(op="placeholder"), strict=True):
        if item.kind is InputKind.PARAMETER:
            made[node] = stored[item.fqn]
        elif item.kind is InputKind.GRADIENT:
            made[node] = gradients[item.fqn]
        else:
            made[node] = add_update_input(graph, item, node)
    return made
