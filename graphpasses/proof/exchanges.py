"""All-to-alls that travel as one: what is unpacked is what each of them alone brings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.ops.pack_all_to_all import packed_dtype
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.operators import AXIOMS
from graphpasses.proof.core.values import Argument

AXIOM = "packed all-to-alls"
AXIOMS[AXIOM] = (
    "where all ranks pack what several all-to-alls send, send it as one and unpack it by the same numbers of rows, "
    "each brings what it brings alone"
)


@dataclass(frozen=True)
class _Packed:
    """What is packed: values, as fake tensors and as numbers, and how many of their rows are for each rank."""

    inputs: tuple[torch.Tensor, ...]
    numbers: tuple[Argument, ...]
    splits: tuple[tuple[Any, ...], ...]
    split_numbers: tuple[tuple[Hashable, ...], ...]


class Exchanges:
    """Follows what is packed through the all-to-all to where it is unpacked."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._packed: dict[int, _Packed] = {}
        self._received: dict[int, tuple[_Packed, Sequence[Any], Hashable]] = {}

    def pack(
        self,
        packed: int,
        inputs: Sequence[fx.Node],
        sizes: Sequence[Any],
        numbers: Sequence[Any],
        splits: Sequence[Hashable],
    ) -> None:
        """Notes a call that packs ``inputs``, cut in ``sizes``; the others are numbers of the values."""
        fakes = tuple(self._facts[each] for each in inputs)
        self._packed[packed] = _Packed(
            fakes, tuple(numbers), _by_member(self.sizes(sizes), len(fakes)), _by_member(splits, len(fakes))
        )

    def __contains__(self, packed: int) -> bool:
        """Whether a number is that of what was packed."""
        return packed in self._packed

    def send(self, sent: int, received: int, outputs: Sequence[Any], inputs: Sequence[Any], group: Hashable) -> None:
        """Notes an all-to-all, if it is of what was packed."""
        if sent in self._packed:
            packed = self._packed[sent]
            if self._totals(packed.inputs, packed.splits) == self.sizes(inputs):
                self._received[received] = packed, self.sizes(outputs), group

    def unpack(
        self, received: int, given: Sequence[Any], splits: Sequence[Hashable]
    ) -> list[tuple[tuple[Any, ...], tuple[Any, Any]]] | None:
        """Returns the arguments of the all-to-alls that a call unpacks, with what comes from, and goes to, each rank;
        None where it does not undo the packing.
        """
        if received not in self._received:
            return None
        packed, totals, group = self._received[received]
        _, by_rank, row_shapes, row_dims, dtypes = given
        num = len(packed.inputs)
        sizes = _by_member(self.sizes(by_rank), num)
        rows = [size for fake in packed.inputs for size in self.sizes(fake.shape[1:])]
        is_undone = (
            [fake.dtype for fake in packed.inputs] == list(dtypes)
            and [fake.dim() - 1 for fake in packed.inputs] == list(row_dims)
            and rows == self.sizes(row_shapes)
            and [*map(len, sizes)] == [*map(len, packed.splits)]
            and self._totals(packed.inputs, sizes) == totals
        )
        if not is_undone:
            return None
        members = zip(packed.numbers, _by_member(splits, num), packed.split_numbers, strict=True)
        given = [(sent, [*outputs], [*inputs], group) for sent, outputs, inputs in members]
        return [*zip(given, zip(sizes, packed.splits, strict=True), strict=True)]

    def sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Returns sizes as numbers, or expressions."""
        return [size_expression(self._facts[each] if isinstance(each, fx.Node) else each) for each in sizes]

    def _totals(self, inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns how many elements travel to or from each rank."""
        dtype = packed_dtype([fake.dtype for fake in inputs])
        units = [
            math.prod(self.sizes(fake.shape[1:]), start=1 if fake.dtype == dtype else fake.dtype.itemsize)
            for fake in inputs
        ]
        return [
            sympy.Add(*(size * unit for size, unit in zip(of_rank, units, strict=True)))
            for of_rank in zip(*splits, strict=True)
        ]


def _by_member(values: Sequence[Any], num: int) -> tuple[tuple[Any, ...], ...]:
    size = len(values) // num
    return tuple(tuple(values[index * size : (index + 1) * size]) for index in range(num))
