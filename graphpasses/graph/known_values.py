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

    def unknown(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the calls that were changed since they were recorded, and those that read another kind of value.

        Args:
            graph: the graph.
        """
        changed = changed_nodes(graph, self._records)
        found: dict[fx.Node, None] = {}
        for node in changed:
            if not self._reads_alike(node):
                found[node] = None
            *_, before = self._records.get(node, (None,))
            now = node.meta.get("val")
            if before is not None and before is not now and not _are_alike(before, now):
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
        return (
            target is node.target
            and value is not None
            and value is node.meta.get("val")
            and self._are_arguments_alike(args, node.args)
            and self._are_arguments_alike(kwargs, node.kwargs)
        )

    def _are_arguments_alike(self, before: Any, now: Any) -> bool:
        if isinstance(before, fx.Node) and isinstance(now, fx.Node):
            return before is now or (
                before in self._records and _are_alike(self._records[before][-1], now.meta.get("val"))
            )
        if type(before) is not type(now):
            return False
        if isinstance(before, (list, tuple)):
            return len(before) == len(now) and all(map(self._are_arguments_alike, before, now))
        if isinstance(before, dict):
            return before.keys() == now.keys() and all(
                self._are_arguments_alike(before[key], now[key]) for key in now
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


def _are_alike(one: Any, two: Any) -> bool:
    """Whether no operator could tell two fake values apart; False if that is not known."""
    facts = facts_of_fake(one)
    return facts is not None and facts == facts_of_fake(two)


def summary(value: Any) -> Any:
    """Returns what two fake values have in common if a program cannot tell them apart by shape, dtype and device.

    Args:
        value: a fake tensor, a symbolic or plain number, or a tree of them.
    """
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        return (summary(value.shape), value.dtype, value.device)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr  # to compare the values themselves would guard on them
    if isinstance(value, (list, tuple)):
        return tuple(map(summary, value))
    if isinstance(value, Mapping):
        return {key: summary(item) for key, item in value.items()}
    return value
