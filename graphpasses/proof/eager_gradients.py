"""What a gradient is in eager: autograd's local sum, reduced where eager FSDP2 has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses.analysis.parameter_collectives import GradReduction, added_uses, find_grad_reductions
from graphpasses.errors import LayoutError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Collective, Layout
from graphpasses.fsdp.layout_diff import Move, Place, layout_places
from graphpasses.graph import TrainGraph
from graphpasses.graph.parameters import ParameterInfo
from graphpasses.ops.reduce_in_tree import ALL_REDUCE_IN_TREE, REDUCE_SCATTER_IN_TREE
from graphpasses.proof import elements, movement
from graphpasses.proof.core.operators import RULES
from graphpasses.proof.core.values import Argument, Value, Values
from graphpasses.proof.evaluated import Evaluated
from graphpasses.proof.pieces import viewed
from graphpasses.proof.terms import Term, term_of

if TYPE_CHECKING:
    from graphpasses.simulate import Topology

AXIOM = (
    "a reduction's element has bits that its summands, its op, its dtype, its group and, unless it adds in a tree, "
    "the bucket's size and its byte offset decide: at eager's place it has eager's"
)
TOPOLOGY_AXIOM = (
    "on the given topology NCCL adds an element in the order of its channel's ring: where two places have one order, "
    "op, dtype and group, they have the same bits"
)
_SPLIT = RULES[torch.ops.aten.split.Tensor][1]
_REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
_ALL_REDUCE = "_c10d_functional.all_reduce.default"
_NAMES: dict[str, Collective] = {
    _REDUCE_SCATTER: "reduce_scatter",
    _ALL_REDUCE: "all_reduce",
    str(REDUCE_SCATTER_IN_TREE): "reduce_scatter",
    str(ALL_REDUCE_IN_TREE): "all_reduce",
}
_COMPARED = ("collective", "ranks", "op", "dtype", "num_bytes", "offset")  # of a place
_WORDS = {"num_bytes": "bytes of the bucket", "offset": "byte offset"}


def layout_of(before: TrainGraph, after: TrainGraph, layout: Layout | None) -> Layout | None:
    """Returns where gradients are reduced: in eager, or as ``after`` does it; None where nothing is known of that."""
    if not before.gradient_slots() or not before.collectives():
        return None
    if layout is None:
        try:
            layout = graph_layout(after)
        except LayoutError:  # a bucket has a part that is no gradient
            return None
    known = {entry.fqn for bucket in layout.buckets for entry in bucket.entries}
    return layout.without(known & before.without_gradient)


@dataclass(eq=False)
class EagerGradients:
    """Says whether gradients of a rewritten step are what eager computes, given where eager reduces them.

    Source: FSDP2's ``_fsdp_param_group.py``, ``post_backward``, reduces what autograd has added up; and
    ``_fsdp_collectives.py``, ``foreach_reduce``.
    """

    values: Values
    before: TrainGraph
    evaluated: Evaluated
    layout: Layout
    _: KW_ONLY
    is_eagers: bool  # whether the layout is eager's; else HSDP's all-reduce may come first, as it is traced
    may_scale: bool  # whether gradients may be divided before and after they are reduced
    topology: Topology | None  # of the cluster, where another place than eager's may be right, too
    is_scaled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._of = self.evaluated.values
        self._reductions = find_grad_reductions(self.before)
        self._places: dict[str, list[Place]] = {}
        for (fqn, _, _), place in layout_places(self.layout).items():
            self._places.setdefault(fqn, []).append(place)

    def is_apart(self, fqn: str) -> bool:
        """Whether uses of a parameter are reduced in several buckets."""
        names = [place.collective for place in self._places.get(fqn, ())]
        return len(names) > len(set(names))

    def difference(self, fqn: str, gradient: Value) -> str | None:
        """Returns how a gradient differs from eager's; empty where it does not, None where that is not known."""
        self.is_scaled = False
        reductions, places = self._reductions.get(fqn, []), self._places.get(fqn, [])
        if not reductions:
            return None
        info = self.before.parameters[fqn]
        reduced, found, offset = gradient, [], 0
        while (reduction := self._reduced(reduced)) is not None:
            offset = reduction.offset = reduction.offset + offset
            found.append(reduction)
            reduced = reduction.sent
            if reduction.name == "reduce_scatter":
                break
        if not found:
            return "it is not the result of one reduction"
        for reduction, place in zip(found[::-1], places if self.is_eagers else [], strict=False):
            if reason := reduction.unlike(place):
                if not self._adds_alike(fqn, place, reduction.place(place)):
                    return reason
                self.evaluated.axioms.add("eager's order")
        if len(found) != len(places) and self.is_eagers:
            return f"it is reduced {len(found)} times, by eager {len(places)} times"
        return self._unlike_sum(info, reductions, found[-1], offset)

    def _adds_alike(self, fqn: str, eager: Place, here: Place) -> bool:
        """Whether NCCL adds in one order at two places, on the given topology."""
        if self.topology is None:
            return False
        from graphpasses.simulate.prediction import find_reordered  # registers a backend

        return find_reordered(Move(fqn, eager, here), self.topology) is None

    def _unlike_sum(
        self, info: ParameterInfo, reductions: list[GradReduction], reduction: _Reduction, offset: int
    ) -> str:
        shards, sent = len(info.shard_ranks), reduction.sent
        place = next((e for e in self._places.get(info.fqn, ()) if e.collective == reduction.name), None)
        if place is None:
            return f"no {reduction.name} is expected for it"
        assert sent.pieces is not None
        row = sent.numel // shards
        cut = viewed(sent.pieces, (shards, row), [((shards, place.padded_numel), (row, 1), offset)])
        if not cut or not cut[0]:
            return "it cannot be followed into the bucket"
        columns = self.values.moved(sent.dtype, (shards, place.padded_numel), cut[0])
        columns = elements.of_others(self.values, columns, sent.dtype, self._unscaled)
        for total in self._sums(reductions, sent.dtype):
            if total is not None and any(
                self._rows(info, each, shards) is columns for each in (total, *self._all_reduced(total, columns))
            ):
                return ""
        return "what is reduced is not autograd's sum of its uses, in order of arrival"

    def _all_reduced(self, total: Value, columns: Value) -> Iterator[Value]:
        """Yields the results of all-reduces of a sum, which HSDP's trace has before the reduce-scatter."""
        for piece in () if self.is_eagers else columns.pieces or ():
            key = self.values.key(piece.source)
            is_all_reduce = key[0] == "result" and key[1][:2] == ("collective", _ALL_REDUCE)
            if is_all_reduce and self.values[key[1][2][0][1].number] is total:
                assert total.dtype is not None
                assert total.shape is not None
                yield self.values.tensor(total.dtype, total.shape, piece.source)

    def _sums(self, reductions: list[GradReduction], dtype: torch.dtype | None) -> Iterator[Value | None]:
        """Yields what eager may reduce: uses added and then cast; of several backward calls, cast and added."""
        assert dtype is not None
        in_order = sorted(reductions, key=lambda each: each.gradient)  # fx compares nodes by their places
        uses = sorted(use for each in in_order for use in added_uses(each.gradient))
        shape = self._of[in_order[0].gradient].shape
        total = self._total(
            [self.values.moved(each.dtype, shape, each.pieces) for each in map(self._of.__getitem__, uses)]
        )
        yield None if total is None else elements.cast(self.values, total, dtype)
        whole = [self._of[each.gradient] for each in in_order]
        yield self._total([elements.cast(self.values, each, dtype) for each in whole])

    def _total(self, summands: list[Value | None]) -> Value | None:
        total = summands[0]
        for each in summands[1:]:
            total = None if total is None or each is None else elements.add(self.values, total, each)
        return total

    def _rows(self, info: ParameterInfo, total: Value, shards: int) -> Value | None:
        """Returns a gradient in the order of its bucket: one row per rank, padded with zeros."""
        if dim := info.shard_dim:  # the chunks of another dim than 0 are brought to dim 0
            assert total.shape is not None
            parts = _SPLIT(self.values, None, total, total.shape[dim] // shards, dim)
            joined = movement.beside(self.values, parts, 0) if isinstance(parts, list) else None
            if joined is None:
                return None
            total = joined
        return movement.chunk_cat(self.values, [total], shards)

    def _unscaled(self, source: int) -> int:
        while self.may_scale and (quotient := self._quotient(source)):
            (source,) = quotient.operands
            self.is_scaled = True
        return source

    def _quotient(self, source: int) -> Term | None:
        """Returns the term of a source that is a quotient; one by a power of two is known as a product."""
        term = term_of(self.values, source, "div", "mul")
        return term if term is not None and (term.kind == "div" or 0 < term.parameters[2] < 1) else None

    def _reduced(self, value: Value) -> _Reduction | None:
        """Returns the reduction of which a value is a part, if it is one run of its elements, cast."""
        if value.pieces is None or len(value.pieces) != 1:
            return None
        (piece,) = value.pieces
        if piece.dims and piece.dims != ((value.numel, 1, 1),):
            return None
        cast = term_of(self.values, piece.source, "cast")  # once, back to the parameter's dtype
        source = piece.source if cast is None else cast.operands[0]
        key = self.values.key(self._unscaled(source))
        if key[0] != "result" or key[1][0] != "collective" or key[1][1] not in _NAMES:
            return None
        _, operator, args, _ = key[1]
        sent = args[0][1]  # of (type, value)
        assert isinstance(sent, Argument)
        op, group = args[1][1], args[-1][1]
        ranks = named_group_ranks(str(group))
        return _Reduction(_NAMES[operator], self.values[sent.number], op, ranks, piece.offset)


@dataclass
class _Reduction:
    """Where a value lies in a reduction."""

    name: Collective
    sent: Value
    op: str
    ranks: tuple[int, ...]
    offset: int

    def place(self, eager: Place) -> Place:
        """Returns eager's place of a gradient, moved to where it is here."""
        assert self.sent.dtype is not None
        size = self.sent.dtype.itemsize
        rows = len(self.ranks) if self.name == "reduce_scatter" else 1
        return replace(
            eager,
            collective=self.name,
            ranks=self.ranks,
            op=self.op,
            dtype=str(self.sent.dtype).removeprefix("torch."),
            num_bytes=self.sent.numel // rows * size,
            offset=self.offset * size,
        )

    def unlike(self, eager: Place) -> str:
        """Returns how the place differs from eager's, in what decides bits."""
        here, there = self.place(eager).what_decides_bits(), eager.what_decides_bits()
        return "; ".join(
            f"{_WORDS.get(name, name)}: {getattr(here, name)}, eager has {getattr(there, name)}"
            for name in _COMPARED
            if getattr(here, name) != getattr(there, name)
        )
