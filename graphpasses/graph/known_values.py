"""Which calls of a graph have a fake value that is known to be what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import facts_of_fake
from graphpasses._torch.fx_graphs import changed_nodes
from graphpasses._torch.schemas import writes_arguments

__all__ = ["KnownValues", "summary"]

_INT = frozenset({int})


class KnownValues:
    """The calls of a graph whose ``meta["val"]`` is known to be what they compute.

    The check between passes owns it, so that it computes new and changed calls only. A graph that is watched
    (:meth:`TrainGraph.watch_values`) tells it what ``emit``, ``emit_copy``, ``replace`` and ``merge`` do. A call that
    reads other nodes, whose fake values no operator could tell from those that it read, computes what it did.

    Args:
        nodes: calls whose values, as they stand now, are taken as true.
    """

    def __init__(self, nodes: Iterable[fx.Node] = ()) -> None:
        self._records: dict[fx.Node, tuple[object, object, object, object]] = {
            node: (node.target, node.args, node.kwargs, node.meta.get("val")) for node in nodes
        }

    def record(self, node: fx.Node) -> None:
        """Takes the value of a call as true, as it stands now.

        Args:
            node: a call.
        """
        self._records[node] = (node.target, node.args, node.kwargs, node.meta.get("val"))

    def is_known(self, node: fx.Node) -> bool:
        """Whether the call and its value are the same objects as when they were recorded.

        Args:
            node: a call.
        """
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
        """Returns the nodes that are not as recorded, or are not recorded.

        Args:
            graph: the graph.
        """
        return changed_nodes(graph, self._records)

    def unknown(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the calls that were changed since they were recorded, and those that read another kind of value.

        Args:
            graph: the graph.
        """
        are_alike = _Likeness()
        changed = self.changed(graph)
        found: dict[fx.Node, None] = {}
        for node in changed:
            if not self._reads_alike(node, are_alike):
                found[node] = None
            *_, before = self._records.get(node, (None,))
            now = node.meta.get("val")
            if before is not None and not are_alike(before, now):
                found.update(dict.fromkeys(node.users))
        for node in changed:
            if node not in found:
                self.record(node)
        return [node for node in found if node.op == "call_function"]

    def _reads_alike(self, node: fx.Node, are_alike: _Likeness) -> bool:
        """Whether a call differs from its record by nodes alone, whose values are those that it read."""
        if node not in self._records or writes_arguments(node.target) or "unbacked_bindings" in node.meta:
            return False
        target, args, kwargs, value = self._records[node]
        return (
            target is node.target
            and value is not None
            and value is node.meta.get("val")
            and self._are_arguments_alike(args, node.args, are_alike)
            and self._are_arguments_alike(kwargs, node.kwargs, are_alike)
        )

    def _are_arguments_alike(self, before: Any, now: Any, are_alike: _Likeness) -> bool:
        if before is now:
            return True
        if isinstance(before, fx.Node) and isinstance(now, fx.Node):
            return before in self._records and are_alike(self._records[before][-1], now.meta.get("val"))
        if type(before) is not type(now):
            return False
        if isinstance(before, (list, tuple)):
            return len(before) == len(now) and all(
                self._are_arguments_alike(*each, are_alike) for each in zip(before, now, strict=True)
            )
        if isinstance(before, dict):
            return before.keys() == now.keys() and all(
                self._are_arguments_alike(before[key], now[key], are_alike) for key in now
            )
        return bool(before == now)

    @contextmanager
    def kept(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """The block may change which nodes calls read or where values are kept, but not what the values are.

        Args:
            nodes: the calls; those that are known now are known after the block.
        """
        known = [node for node in nodes if self.is_known(node)]
        yield
        for node in known:
            self.record(node)


class _Likeness:
    """Whether no operator could tell two fake values apart; False if that is not known. They live as long as this."""

    def __init__(self) -> None:
        self._facts: dict[int, Any] = {}  # by the values' ids: a value has several readers

    def __call__(self, one: Any, two: Any) -> bool:
        return one is two or ((facts := self._facts_of(one)) is not None and facts == self._facts_of(two))

    def _facts_of(self, value: Any) -> Any:
        if id(value) not in self._facts:
            self._facts[id(value)] = facts_of_fake(value)
        return self._facts[id(value)]


def summary(value: Any) -> Any:
    """Returns what two fake values have in common if a program cannot tell them apart by shape, dtype and device.

    Args:
        value: a fake tensor, a symbolic or plain number, or a tree of them.
    """
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
