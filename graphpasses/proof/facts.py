"""The fake values of a graph's nodes, as they must be, and which of them share memory."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.fake_results import fake_call
from graphpasses._torch.schemas import returns_alias
from graphpasses.analysis.effects import operator_effects
from graphpasses.graph.nodes import freeze, memories
from graphpasses.proof.values import geometry


class Facts:
    """The fake values of a graph's nodes, computed again where the graph is not as one that is known.

    A pass may leave a node whose ``meta["val"]`` is what it was before other strides came in. ``known`` is a graph
    whose fake values are true; None if this one's are. ``geometries`` are shape, strides and offset of each value,
    or of each of several; ``alias`` is the node in whose memory a node's value lies, if it made none itself.
    """

    def __init__(self, graph: fx.Graph, known: Facts | None = None) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.geometries: dict[fx.Node, Any] = {}
        self.alias: dict[fx.Node, fx.Node | None] = {}
        self.by_name: dict[str, fx.Node] = {}
        for node in graph.nodes:
            self.by_name[node.name] = node
            if node.op == "output":
                continue
            original = known.by_name.get(node.name) if known is not None else None
            same = known is None or (isinstance(original, fx.Node) and self._is_same(node, original, known))
            self.values[node] = node.meta.get("val") if same else self._computed(node)
            self.geometries[node] = geometries(self.values[node])
            self.alias[node] = (
                self._alias_as(node, original, known)
                if same and known is not None and original
                else self._alias(node)
            )

    def __getitem__(self, node: fx.Node) -> Any:
        return self.values[node]

    def _is_same(self, node: fx.Node, original: fx.Node, known: Facts) -> bool:
        if (
            node.op != original.op
            or node.target != original.target
            or node.meta.get("val") is not original.meta.get("val")
        ):
            return False
        if node.op != "call_function":
            return True
        mine, theirs = node.all_input_nodes, original.all_input_nodes
        if len(mine) != len(theirs) or freeze(_plain(node)) != freeze(_plain(original)):
            return False
        return all(
            self.geometries[a] == known.geometries[b] and _dtypes(self.values[a]) == _dtypes(known.values[b])
            for a, b in zip(mine, theirs, strict=True)
        )

    def _computed(self, node: fx.Node) -> Any:
        if node.op != "call_function" or _depends_on_data(node.meta.get("val")):
            return node.meta.get("val")
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        mode = fake_mode_of(args, kwargs)
        if mode is None:
            return node.meta.get("val")
        return fake_call(mode, node.target, args, kwargs)

    def _alias(self, node: fx.Node) -> fx.Node | None:
        """Returns the node in whose memory this one's value lies, if it made none itself."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            base = self.alias.get(source)
            return base if base is not None and self._share(node, base) else None
        if not returns_alias(node.target):
            return None
        return next((each for each in operator_effects(node).shares if self._share(node, each)), None)

    def _share(self, node: fx.Node, source: fx.Node) -> bool:
        return not memories(self.values[node]).isdisjoint(memories(self.values[source]))

    def _alias_as(self, node: fx.Node, original: fx.Node, known: Facts) -> fx.Node | None:
        source = known.alias[original]
        if source is None:
            return None
        if node.target is operator.getitem:
            return self.alias[node.all_input_nodes[0]]
        return node.all_input_nodes[original.all_input_nodes.index(source)]


def _plain(node: fx.Node) -> Any:
    return fx.node.map_arg((node.args, node.kwargs), lambda _: None)


def geometries(value: Any) -> Any:
    """Returns shape, strides and offset of a fake value, or of each of several."""
    if isinstance(value, (list, tuple)):
        return tuple(map(geometries, value))
    return geometry(value)


def _depends_on_data(value: Any) -> bool:
    """Whether strides say nothing: to compute such values again may have the compiler guard on sizes."""
    if isinstance(value, (list, tuple)):
        return any(map(_depends_on_data, value))
    return value is not None and geometry(value) is None


def _dtypes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_dtypes, value))
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else None
