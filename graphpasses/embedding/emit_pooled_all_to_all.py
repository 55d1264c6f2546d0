"""One all-to-all for several that carry pooled embeddings of one batch: their dims lie side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from graphpasses.embedding.torchrec.pooled_all_to_all import VIEWS, PooledAllToAll
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument, wait_of
from graphpasses.graph.size_arithmetic import SizeArithmetic
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.ops.pack_all_to_all import PACK_POOLED_EMBEDDINGS

aten = torch.ops.aten
# They read what is not contiguous as well as what is.
_READ_SLICES = (aten.cat.default, aten.stack.default, JOIN_FEATURES)


class MergedPooledAllToAll:
    """Emits one all-to-all for several that carry pooled embeddings, or gradients, of one batch.

    Call ``emit_sent`` and ``emit_launch`` where all members' inputs are there, ``emit_received`` before the members'
    waits, and ``erase_members`` at the end. Dims lie in the order of the modules; gradients come in reverse.
    """

    def __init__(self, graph: TrainGraph, members: Sequence[PooledAllToAll]) -> None:
        self._graph = graph
        self._like = members[0].launch
        self._replaced: list[tuple[fx.Node, fx.Node]] = []
        self._is_gradient = members[0].is_gradient
        self._members = members[::-1] if self._is_gradient else members
        self._own = [member for member in self._members if member.num_dims]
        self._sizes = SizeArithmetic(graph, like=self._like)

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.emit(target, args, kwargs, like=self._like)

    def emit_sent(self) -> None:
        """Emits what is sent, and how much of it is for each rank."""
        units = [member.unit for member in self._members]
        self._splits = [
            [self._sizes.dot(sizes, units) for sizes in zip(*splits, strict=True)]
            for splits in ([member.splits[index] for member in self._members] for index in (0, 1))
        ]
        if self._is_gradient:
            by_rank = [*zip(*map(self._gradient_by_rank, self._members), strict=True)]
            pieces = [[piece for piece in of_rank if piece is not None] for of_rank in by_rank]
            self._sent = self._emit(
                PACK_POOLED_EMBEDDINGS, [piece for of_rank in pieces for piece in of_rank], [*map(len, pieces)]
            )
        elif self._own:
            joined = self._joined_tables()
            # As a node of its own, so that AOTAutograd can give backward the symbol in the shapes that it keeps.
            num_rows = self._emit(aten.sym_size.int, joined, 0)
            num_dims = sum(member.num_dims for member in self._own)
            self._sent = self._emit(aten.view.default, joined, [self._sizes.product(num_rows, num_dims)])
        else:
            self._sent = argument(self._members[0].launch)  # empty

    def _gradient_by_rank(self, member: PooledAllToAll) -> list[fx.Node | None]:
        """Returns the gradient of each rank's tables, [rows, dims of the rank], as it is sent."""
        if len(member.batch_side) > 1:
            return [*member.batch_side]
        ends = [0, *accumulate(member.dims_by_rank)]
        return [
            self._slice_dims(member.batch_side[0], start, end) if start < end else None
            for start, end in pairwise(ends)
        ]

    def _joined_tables(self) -> fx.Node:
        """Returns this rank's embeddings side by side: the lookup's own output, if it is split into no others."""
        parts = [member.table_side for member in self._own]
        split = parts[0].args[0] if parts[0].target is operator.getitem else None
        if isinstance(split, fx.Node) and split.target == SPLIT_FEATURES:
            is_whole = all(part.args == (split, index) for index, part in enumerate(parts))
            if is_whole and len(split.users) == len(parts):
                return argument(split)
        if len(parts) == 1:
            return parts[0]
        return self._emit(JOIN_FEATURES, parts, self._emit(aten.sym_size.int, parts[0], 0))

    def emit_launch(self) -> None:
        self._launch = self._emit(ALL_TO_ALL, self._sent, *self._splits, self._like.args[3])

    def emit_received(self) -> None:
        """Emits the wait, and gives what arrives to the members' readers."""
        received = self._emit(WAIT, self._launch)
        if self._is_gradient:
            self._receive_gradients(received)
        else:
            self._receive_embeddings(received)

    def _receive_embeddings(self, received: fx.Node) -> None:
        by_rank = [*zip(*(member.dims_by_rank for member in self._members), strict=True)]
        sources = [rank for rank, dims in enumerate(by_rank) if any(dims)]
        parts = [received]
        if len(sources) > 1:
            sizes = [self._splits[0][rank] for rank in sources]
            split = self._emit(aten.split_with_sizes.default, received, sizes)
            parts = [self._emit(operator.getitem, split, index) for index in range(len(sources))]
        num_rows = self._members[0].num_rows
        blocks = {
            rank: self._emit(aten.view.default, part, [num_rows, sum(by_rank[rank])])
            for rank, part in zip(sources, parts, strict=True)
        }
        ends = [[0, *accumulate(dims)] for dims in by_rank]
        for index, member in enumerate(self._members):
            pieces = [
                self._slice_dims(blocks[rank], ends[rank][index], ends[rank][index + 1])
                for rank, num_dims in enumerate(member.dims_by_rank)
                if num_dims
            ]
            if len(member.batch_side) == 1 < len(pieces):
                pieces = [self._emit(aten.cat.default, pieces, 1)]
            for node, piece in zip(member.batch_side, pieces, strict=True):
                self._give_embeddings(node, piece)

    def _give_embeddings(self, node: fx.Node, piece: fx.Node) -> None:
        if piece.target == aten.slice.Tensor and any(user.target not in _READ_SLICES for user in node.users):
            self._replaced.append((node, self._contiguous(piece)))
        else:
            node.replace_all_uses_with(piece)

    def _receive_gradients(self, received: fx.Node) -> None:
        for member in self._members:
            if not member.num_dims:
                empty = self._emit(aten.slice.Tensor, received, 0, 0, 0)
                wait_of(member.launch).replace_all_uses_with(empty)
        if not self._own:
            return
        ends = [0, *accumulate(member.num_dims for member in self._own)]
        num_rows = self._emit(operator.floordiv, self._sizes.sum(self._splits[0]), ends[-1])
        block = self._emit(aten.view.default, received, [num_rows, ends[-1]])
        if (scale := self._own[0].scale) is not None:
            block = self._emit(aten.div.Tensor, block, scale)
        if (join := self._join_of_all()) is not None:
            join.replace_all_uses_with(block)
            self._graph.graph.erase_node(join)
        for member, (start, end) in zip(self._own, pairwise(ends), strict=True):
            if member.table_side.users:
                self._give_gradient(member.table_side, self._slice_dims(block, start, end), block)

    def _give_gradient(self, tables: fx.Node, gradient: fx.Node, block: fx.Node) -> None:
        if all(user.target == JOIN_FEATURES for user in tables.users):
            tables.replace_all_uses_with(gradient)
            return
        if gradient is not block:
            gradient = self._contiguous(gradient)
        if tables.target not in VIEWS:
            self._replaced.append((tables, gradient))
            return
        # The view stays: its shape may have other symbols, as the number of lengths.
        tables.replace_input_with(argument(tables), self._emit(aten.view.default, gradient, [-1]))

    def _join_of_all(self) -> fx.Node | None:
        """Returns the operator that only joins again what arrived joined."""
        tables = [member.table_side for member in self._own]
        if len(tables[0].users) != 1:
            return None
        (join,) = tables[0].users
        return join if join.target == JOIN_FEATURES and join.args[0] == tables else None

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self._emit(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _slice_dims(self, block: fx.Node, start: int, end: int) -> fx.Node:
        if (start, end) == (0, block.meta["val"].shape[1]):
            return block
        return self._emit(aten.slice.Tensor, block, 1, start, end)

    def erase_members(self) -> None:
        """Erases the members, and what only they read."""
        for node, value in self._replaced:  # now that no node is inserted before one of them
            self._graph.replace(node, value)
        for member in self._members:
            following = [member.launch]
            for node in following:
                following += node.users
            for node in reversed(following):
                self._graph.graph.erase_node(node)
