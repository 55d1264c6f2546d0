"""Memory that a compiled graph writes, and that several of its inputs share: as many as when it was compiled."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.storage import span_of
from graphpasses.analysis.effects import written_memory
from graphpasses.errors import UnsupportedError
from graphpasses.graph import DynamoGraph
from graphpasses.graph.nodes import storages


class WrittenMemory:
    """Which inputs lie in the memory of those that a graph writes, and where.

    Dynamo compiles again for one tensor that is given twice, not for two in one memory, of which AOTAutograd makes
    one graph and of others another: either reads old values where the other kind is given.
    """

    def __init__(self, graph: DynamoGraph) -> None:
        memory = written_memory(graph.graph)
        self._names = [item.fqn for item in graph.inputs]
        self._written = {index for index, node in enumerate(graph.placeholders) if storages(node) & memory}
        # Where inputs of the last call began, how many elements they had, and from where to where they lay.
        self._last: tuple[list[_Place], dict[int, tuple[int, int]]] = [], {}
        self._shared: dict[tuple[int, int], int] | None = None  # when it was compiled

    def check(self, values: Sequence[Any]) -> None:
        """Raises if inputs of a call share other memory than those of the first, for which the graph was compiled."""
        if not self._written:
            return
        tensors = [local_part(each) if isinstance(each, torch.Tensor) else None for each in values]
        places = [_place(each) for each in tensors]
        before, spans = self._last
        if places == before:
            return
        changed = [index for index, each in enumerate(places) if not before or each != before[index]]
        found = {index: None if (tensor := tensors[index]) is None else span_of(tensor) for index in changed}
        spans = {index: span for index, span in (spans | found).items() if span is not None}
        shared = dict(self._find_shared(spans))
        if self._shared is None:
            self._shared = shared
        if shared != self._shared:
            one, two = min({pair for pair, _ in shared.items() ^ self._shared.items()})
            raise UnsupportedError(
                f"a compiled graph writes in place, and {self._names[one]} and {self._names[two]} lie otherwise in "
                "one memory, or in two, than when it was compiled: it may read what eager has written over, and "
                "torch does not compile it again. Give a clone of one, or call torch._dynamo.reset() before"
            )
        self._last = places, spans

    def _find_shared(self, spans: dict[int, tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
        """Yields pairs of inputs in one memory, of which one is written, and how far the second is from the first."""
        together: list[int] = []
        last = 0
        for index, (start, end) in sorted(spans.items(), key=operator.itemgetter(1)):
            if start >= last:
                together = []
            for other in together:
                one, two = sorted((index, other))
                if start < spans[other][1] and not self._written.isdisjoint((one, two)):
                    yield (one, two), spans[two][0] - spans[one][0]
            together.append(index)
            last = max(last, end)


_Place: TypeAlias = tuple[int, int] | None


def _place(tensor: torch.Tensor | None) -> _Place:
    is_there = tensor is not None and tensor.layout is torch.strided and not is_fake(tensor)
    return (tensor.data_ptr(), tensor.numel()) if tensor is not None and is_there else None
