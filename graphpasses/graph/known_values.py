"""Which calls of a graph have a fake value that is known to be what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.types import py_sym_types

_INT = frozenset({int})


class KnownValues:
    """The calls of a graph whose ``meta["val"]`` is known to be what they compute, and need no check."""

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
        return args is node.args and value is node.meta.get("val") and target is node.target and kwargs is node.kwargs

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the nodes that are not as recorded, or are not recorded."""
        return [node for node in graph.nodes if not self.is_known(node)]

    def unknown(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the calls that were changed since they were recorded, and those that read a changed value."""
        found: dict[fx.Node, None] = {}
        for node in self.changed(graph):
            found[node] = None
            *_, before = self._records.get(node, (None,))
            if before is not None and before is not node.meta.get("val"):
                found.update(dict.fromkeys(node.users))
        return [node for node in found if node.op == "call_function"]

    @contextmanager
    def kept(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """Those of ``nodes`` that are known stay so: the block may change what calls read, but no value."""
        known = [node for node in nodes if self.is_known(node)]
        yield
        for node in known:
            self.record(node)


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
    if isinstance(value, py_sym_types):
        return value.node.expr  # to compare the values themselves would guard on them
    if isinstance(value, (list, tuple)):
        return tuple(map(summary, value))
    if isinstance(value, Mapping):
        return {key: summary(item) for key, item in value.items()}
    return value
