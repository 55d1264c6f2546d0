"""Memory that a compiled graph writes, and that several of its inputs share: as many as when it was compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.storage import memories, sharing, span_of
from graphpasses._torch.symbols import have_symbols
from graphpasses.analysis.effects import written_memory
from graphpasses.errors import UnsupportedError
from graphpasses.graph import DynamoGraph


class WrittenMemory:
    """Which inputs lie in the memory of those that a graph writes, and where.

    Dynamo compiles again for one tensor that is given twice, not for two in one memory, of which AOTAutograd makes
    one graph and of others another: either reads old values where the other kind is given.
    """

    def __init__(self, graph: DynamoGraph) -> None:
        memory = written_memory(graph.graph)
        fakes = [node.meta.get("val") for node in graph.placeholders]
        self._names = [item.fqn for item in graph.inputs]
        self._written = {index for index, fake in enumerate(fakes) if memories(fake) & memory}
        self._strided = [
            i for i, each in enumerate(fakes) if isinstance(each, Tensor) and each.layout is torch.strided
        ]
        self._are_plain = not any(is_tensor_subclass(fakes[index]) for index in self._strided)
        self._varying = [index for index in self._strided if have_symbols([fakes[index]])]
        self._last: list[int] = []  # where inputs of the last call began, and how many elements some had
        self._spans: dict[int, tuple[int, int]] = {}  # from where to where they lay
        self._shared: dict[tuple[int, int], int] | None = None  # when it was compiled

    def check(self, values: Sequence[Any]) -> None:
        """Raises if inputs of a call share other memory than those of the first, for which the graph was compiled."""
        if not self._written:
            return
        tensors = (values[index] for index in self._strided)
        starts = [each.data_ptr() for each in (tensors if self._are_plain else map(local_part, tensors))]
        starts += [local_part(values[index]).numel() for index in self._varying]
        if starts == self._last:
            return
        pairs = zip(self._strided, starts, self._last or itertools.repeat(-1), strict=False)
        changed = {*self._varying, *(index for index, start, before in pairs if start != before)}
        found = {index: span_of(local_part(values[index])) for index in changed}
        spans = {index: span for index, span in (self._spans | found).items() if span is not None}
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
        self._last, self._spans = starts, spans

    def _find_shared(self, spans: dict[int, tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
        """Yields pairs of inputs in one memory, of which one is written, and how far the second is from the first."""
        for pair in sharing(spans):
            one, two = sorted(pair)
            if not self._written.isdisjoint(pair):
                yield (one, two), spans[two][0] - spans[one][0]
