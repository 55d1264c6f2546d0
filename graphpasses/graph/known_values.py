"""Which calls of a graph have a fake value that is known to be what they compute."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import facts_of_fake
from graphpasses._torch.schemas import writes_arguments
from graphpasses.graph.nodes import freeze

_INT = frozenset({int})


class KnownValues:
    """The calls of a graph whose ``meta["val"]`` is known to be what they compute, as those of ``nodes`` now are.

    The check between passes computes others only; what :class:`TrainGraph` emits or replaces is told to it. A call
    that reads other nodes, whose fake values no operator could tell from those that it read, computes what it did.
    """

    def __init__(self, nodes: Iterable[fx.Node] = ()) -> None:
        self._records: dict[fx.Node, tuple[object, object, object, object]] = {}
        for node in nodes:
            self.record(node)

    def record(self, node: fx.Node) -> None:
        """Takes the value of a call as true, as it stands now."""
        self._records[node] = (node.target, node.args, node.kwargs, node.meta.get("val"))

    def is_known(self, node: fx.Node) -> bool:
        """Whether the call and its value are the same objects as when they were recorded."""
        if node not in self._records:
            return False
        target, args, kwargs, value = self._records[node]
        return (
            args is node.args
            and value is node.meta.get("val")
            and target is node.target
            and kwargs is node.kwargs
        )

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the nodes that are not as recorded, or are not recorded."""
        return [node for node in graph.nodes if not self.is_known(node)]

    def unknown(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the calls that were changed since they were recorded, and those that read another kind of value."""
        changed = self.changed(graph)
        found: dict[fx.Node, None] = {}
        for node in changed:
            if not self._reads_alike(node):
                found[node] = None
            *_, before = self._records.get(node, (None,))
            if before is not None and not _are_alike(before, node.meta.get("val")):
                found.update(dict.fromkeys(node.users))
        for node in changed:
            if node not in found:
                self.record(node)
        return [node for node in found if node.op == "call_function"]

    def _reads_alike(self, node: fx.Node) -> bool:
        """Whether a call differs from its record by nodes alone, whose values are those that it read."""
        if node not in self._records or writes_arguments(node.target) or "unbacked_bindings" in node.meta:
            return False
        target, args, kwargs, value = self._records[node]
        if target is not node.target or value is None or value is not node.meta.get("val"):
            return False
        (before, read_before), (now, read) = _parts(args, kwargs), _parts(node.args, node.kwargs)
        return before == now and all(
            one in self._records and _are_alike(self._records[one][-1], two.meta.get("val"))
            for one, two in zip(read_before, read, strict=True)
        )

    @contextmanager
    def kept(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """Those of ``nodes`` that are known stay so: the block may change what calls read, but no value."""
        known = [node for node in nodes if self.is_known(node)]
        yield
        for node in known:
            self.record(node)


def _parts(args: Any, kwargs: Any) -> tuple[Hashable, list[fx.Node]]:
    """Returns a key for a call's arguments but for the nodes among them, and the nodes."""
    nodes: list[fx.Node] = []
    return freeze(fx.node.map_arg((args, kwargs), nodes.append)), nodes


def _are_alike(one: Any, two: Any) -> bool:
    """Whether no operator could tell two fake values apart; False if that is not known."""
    return one is two or ((facts := facts_of_fake(one)) is not None and facts == facts_of_fake(two))


def summary(value: Any) -> Any:
    """Returns what two fake values, or trees of them, have in common that differ by no shape, dtype or device."""
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        sizes = value.shape
        return (
            tuple(sizes) if _INT.issuperset(map(type, sizes)) else summary(sizes),
            value.dtype,
            value.device,
        )
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr  # to compare the values themselves would guard on them
    if isinstance(value, (list, tuple)):
        return tuple(map(summary, value))
    if isinstance(value, Mapping):
        return {key: summary(item) for key, item in value.items()}
    return value
