"""Pooled embeddings of several modules that travel side by side: row for row as one tensor of more columns.

TorchRec sends each module's embeddings on their own: ``[rows, dims]`` of this rank's tables, rows by rank that they
are for; what arrives, ``[rows, dims]`` of each rank's tables, becomes columns, or is added, where each rank holds
rows of the same tables. Those of modules that have the same batch can be columns of one tensor from the lookup that
computes them to the tensor that they are joined to, and nothing is copied on the way; members that are packed (see
:mod:`.packing`) lie one behind the other.

::

    split_features(pooled) -> view -> all_to_all -> wait -> _split_1d_cat_2d      for each module
    split_features(pooled) -> all_to_all -> wait -> split_with_sizes -> +         for tables cut by rows
        ->   view(pooled) -> all_to_all -> wait -> view -> slice                  one for all
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.symbols import expression
from graphpasses.analysis.effects import collective_group
from graphpasses.collective_sequence import Launches
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument
from graphpasses.graph.size_arithmetic import Size, SizeArithmetic
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES

__all__ = ["PACK_COLUMNS", "Columns", "agree_on_columns", "merge_columns"]

torch.library.define(
    "graphpasses::pack_columns",
    "(Tensor[] pieces, int[] num_pieces) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
PACK_COLUMNS = torch.ops.graphpasses.pack_columns.default
aten = torch.ops.aten


def _pack_columns(pieces: list[Tensor], num_pieces: list[int]) -> Tensor:
    """Lays the columns for each rank behind those for the one before; a rank gets so many of the pieces."""
    num_rows = pieces[0].shape[0]
    packed = pieces[0].new_empty(num_rows * sum(piece.shape[1] for piece in pieces))
    start = piece = 0
    for count in num_pieces:
        of_rank = pieces[piece : piece + count]
        piece += count
        if total := sum(part.shape[1] for part in of_rank):
            place = packed.narrow(0, start, num_rows * total)
            torch.cat(of_rank, 1, out=place.view(num_rows, total))
            start += num_rows * total
    return packed


def _fake_pack_columns(pieces: list[Tensor], num_pieces: list[int]) -> Tensor:
    return pieces[0].new_empty(pieces[0].shape[0] * sum(piece.shape[1] for piece in pieces))


torch.library.impl("graphpasses::pack_columns", "default", _pack_columns)
torch.library.register_fake("graphpasses::pack_columns", _fake_pack_columns)


@dataclass(frozen=True)
class Columns:
    """A member: an all-to-all of pooled embeddings, or of their gradients.

    Args:
        launch: the all-to-all.
        is_gradient: whether gradients travel, from the columns to the tables.
        rows: columns' side: what is received, or sent (gradients); one tensor whose columns are those of all ranks'
            tables, or a tensor per rank.
        widths: how many of the columns belong to each rank's tables.
        tables: tables' side: what is sent, or received (gradients), [rows of all ranks, dims of this rank].
        num_rows: rows on the columns' side, of embeddings.
        scale: what received gradients are divided by; None if they are not.
        unit: elements that a split of the all-to-all counts as one.
    """

    launch: fx.Node
    is_gradient: bool
    rows: tuple[fx.Node, ...]
    widths: tuple[int, ...]
    tables: fx.Node
    num_rows: Size = 0
    scale: Any = None
    unit: int = 1

    @property
    def kind(self) -> object:
        """Members of one kind, of the same batches, can be merged."""
        value = self.tables.meta["val"]
        return self.is_gradient, collective_group(self.launch), value.dtype, value.device, self.scale

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return named_group(str(collective_group(self.launch))).rank()

    @property
    def num_dims(self) -> int:
        """Columns of this rank's tables."""
        return self.widths[self.rank]

    @property
    def splits(self) -> tuple[Sequence[Size], Sequence[Size]]:
        """What is received from and sent to each rank, in units."""
        return self.launch.args[1:3]  # type: ignore[return-value]

    @property
    def rows_by_rank(self) -> list[Any]:
        """Symbolic rows on the tables' side that belong to each rank; there are some if this rank has tables."""
        sizes = self.splits[0 if self.is_gradient else 1]
        return [_divide(_expression(size) * self.unit, self.num_dims) for size in sizes]


def agree_on_columns(launches: Launches) -> dict[fx.Node, tuple[Columns, tuple[int, ...]]]:
    """Returns which all-to-alls can travel as columns, and with which others: those of one class.

    All ranks must call it alike; every rank returns the same.

    Args:
        launches: the collectives of a graph.

    Raises:
        AgreementError: this rank compiled again, and cannot do any more what all ranks agreed to do.
    """
    candidates = launches.all_to_alls
    if not candidates:
        return {}
    columns = {launch: _read(launch) for launch in candidates}
    own = _classes(columns)
    classes: dict[fx.Node, tuple[Columns, tuple[int, ...]]] = {}
    now: dict[tuple[int, ...], int] = {}
    for group in launches.groups:
        everyone = launches.agree("columns", list(own.values()), group)
        for launch, told in zip(candidates, zip(*everyone, strict=True), strict=True):
            member = columns[launch]
            if collective_group(launch) != group or -1 in told:
                continue
            if member is None or now.setdefault(told, own[launch]) != own[launch] or own[launch] < 0:
                raise AgreementError(
                    f"rank {dist.get_rank()} compiled the model again, and now modules have batches of different "
                    "sizes, of which it told the other ranks that they are equal. Disable 'bucket-all-to-all' for "
                    "this model"
                )
            classes[launch] = member, told
    return classes


def _classes(columns: Mapping[fx.Node, Columns | None]) -> dict[fx.Node, int]:
    """Returns a number for each all-to-all, equal for those that this rank can merge; -1 for others."""
    number_of: dict[object, int] = {}
    rows_of: dict[object, list[object]] = {}
    for member in columns.values():
        if member is not None and member.num_dims:
            rows_of.setdefault(_batches(member), member.rows_by_rank)
    classes = {}
    for launch, member in columns.items():
        if member is None or (member.num_dims and member.rows_by_rank != rows_of[_batches(member)]):
            classes[launch] = -1
        else:
            classes[launch] = number_of.setdefault(_batches(member), len(number_of))
    return classes


def _batches(member: Columns) -> object:
    """Returns a key, equal for members whose batches have the same sizes, as far as the tables' side tells."""
    own = _expression(member.rows[0].meta["val"].shape[0])
    everyone = (
        sum(member.rows_by_rank) if member.num_dims else _expression(member.tables.meta["val"].shape[0])
    )
    return member.kind, own, everyone


def _expression(size: Any) -> Any:
    return expression(size.meta["val"] if isinstance(size, fx.Node) else size)


def _divide(size: Any, num_dims: int) -> Any:
    return size // num_dims if isinstance(size, int) else sympy.expand(size / num_dims)


def _read(launch: fx.Node) -> Columns | None:
    """Returns what an all-to-all carries, if it is pooled embeddings or their gradients."""
    return _read_embeddings(launch) or _read_sums(launch) or _read_gradients(launch)


def _read_embeddings(launch: fx.Node) -> Columns | None:
    rows, flat = _only_user(_only_user(launch)), argument(launch)
    if rows is None or str(rows.target) != _TO_COLUMNS or flat.target not in _VIEWS:
        return None
    num_rows, widths = rows.args[1:3]
    return _checked(Columns(launch, False, (rows,), _numbers(widths), argument(flat), num_rows=num_rows))  # type: ignore[arg-type]


def _read_sums(launch: fx.Node) -> Columns | None:
    """Reads embeddings of tables that are cut by rows: of each rank arrives a part of every sum."""
    split = _only_user(_only_user(launch))
    if split is None or split.target != aten.split_with_sizes.default or len(split.args) > 2:
        return None
    outputs = {user.args[1]: user for user in split.users}
    sizes: Sequence[Size] = split.args[1]  # type: ignore[assignment]
    if [*sorted(outputs)] != [*range(len(sizes))] or len(outputs) != len(split.users):  # type: ignore[type-var]
        return None
    parts = tuple(outputs[index] for index in range(len(sizes)))
    return _parts(launch, False, parts, argument(launch), num_rows=sizes[0])


def _read_gradients(launch: fx.Node) -> Columns | None:
    flat, received = argument(launch), next(iter(launch.users))
    scale = None
    divided = _only_user(received)
    if divided is not None and divided.target == aten.div.Tensor and not isinstance(divided.args[1], fx.Node):
        received, scale = divided, divided.args[1]
    if flat.target == aten.cat.default and flat.args[1:] in ((), (0,)):
        return _parts(launch, True, tuple(flat.args[0]), received, scale=scale)  # type: ignore[arg-type]
    tables = _only_user(received)
    if str(flat.target) != _FROM_COLUMNS or tables is None or tables.target not in _VIEWS:
        return None
    return _checked(Columns(launch, True, (argument(flat),), _numbers(flat.args[1]), tables, scale=scale))


def _parts(
    launch: fx.Node,
    is_gradient: bool,
    parts: tuple[fx.Node, ...],
    tables: fx.Node,
    **details: Any,
) -> Columns | None:
    """Returns what has a tensor of equal shape for each rank, which an all-to-all of rows sends or receives."""
    splits: Sequence[Size] = launch.args[2 if is_gradient else 1]  # type: ignore[assignment]
    shapes = {tuple(map(expression, part.meta["val"].shape)) for part in parts}
    (shape, *others) = shapes
    if others or len(shape) != 2 or not isinstance(shape[1], int):
        return None
    if len(parts) != len(splits) or any(_expression(size) != shape[0] for size in splits):
        return None
    widths = (shape[1],) * len(parts)
    return _checked(Columns(launch, is_gradient, parts, widths, tables, unit=shape[1], **details))


def _numbers(widths: Any) -> tuple[int, ...]:
    return tuple(widths)


def _checked(member: Columns) -> Columns | None:
    shape = member.tables.meta["val"].shape
    is_known = len(shape) == 2 and isinstance(shape[1], int) and shape[1] == member.num_dims
    return member if is_known and any(member.widths) else None


_VIEWS = (aten.view.default, aten.reshape.default)
# By name: TorchRec defines them, if it is there.
_TO_COLUMNS = "torchrec._split_1d_cat_2d.default"
_FROM_COLUMNS = "torchrec._split_1d_cat_2d_backward_impl.default"


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def merge_columns(
    graph: TrainGraph, bucket: Sequence[fx.Node], columns: Mapping[fx.Node, tuple[Columns, tuple[int, ...]]]
) -> list[fx.Node]:
    """Merges those of a bucket that can travel as columns of one tensor.

    Args:
        graph: the graph.
        bucket: adjacent all-to-alls whose waits are adjacent, too.
        columns: what all ranks agreed on, see :func:`agree_on_columns`.

    Returns:
        The all-to-alls that are left, the merged ones first.
    """
    classes: dict[object, list[Columns]] = {}
    for launch in bucket:
        if launch in columns:
            member, told = columns[launch]
            classes.setdefault(told, []).append(member)
    merged = [_Merged(graph, members) for members in classes.values()]
    if not merged:
        return list(bucket)
    first_wait = next(iter(bucket[0].users))
    gone = {member.launch for group in merged for member in group.members}
    with graph.graph.inserting_before(bucket[0]):
        for group in merged:
            group.emit_sent()
        launches = [group.emit_launch() for group in merged]
    with graph.graph.inserting_before(first_wait):
        for group in merged:
            group.emit_received()
    for group in merged:
        group.erase()
    return [*launches, *(launch for launch in bucket if launch not in gone)]


class _Merged:
    """Members that become one: gradients come in reverse, so all lie in the order of the modules."""

    def __init__(self, graph: TrainGraph, members: Sequence[Columns]) -> None:
        self._graph = graph
        self._like = members[0].launch
        self._replaced: list[tuple[fx.Node, fx.Node]] = []
        self.members = members[::-1] if members[0].is_gradient else members
        self._is_gradient = members[0].is_gradient
        self._own = [member for member in self.members if member.num_dims]
        self._sizes = SizeArithmetic(graph, like=self._like)

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.emit(target, args, kwargs, like=self._like)

    def emit_sent(self) -> None:
        units = [member.unit for member in self.members]
        self._splits = [
            [self._sizes.dot(sizes, units) for sizes in zip(*splits, strict=True)]
            for splits in ([member.splits[index] for member in self.members] for index in (0, 1))
        ]
        if self._is_gradient:
            by_rank = [*zip(*map(self._by_rank, self.members), strict=True)]
            pieces = [[piece for piece in of_rank if piece is not None] for of_rank in by_rank]
            self._sent = self._emit(
                PACK_COLUMNS, [piece for of_rank in pieces for piece in of_rank], [*map(len, pieces)]
            )
        elif self._own:
            joined = self._joined()
            # As a node of its own, so that AOTAutograd can give backward the symbol in the shapes that it keeps.
            num_rows = self._emit(aten.sym_size.int, joined, 0)
            num_dims = sum(member.num_dims for member in self._own)
            self._sent = self._emit(aten.view.default, joined, [self._sizes.product(num_rows, num_dims)])
        else:
            self._sent = argument(self.members[0].launch)  # empty

    def _by_rank(self, member: Columns) -> list[fx.Node | None]:
        """Returns the columns of each rank's tables, as they are sent."""
        if len(member.rows) > 1:
            return [*member.rows]
        ends = [0, *accumulate(member.widths)]
        return [
            self._columns(member.rows[0], start, end) if start < end else None
            for start, end in pairwise(ends)
        ]

    def _joined(self) -> fx.Node:
        parts = [member.tables for member in self._own]
        split = parts[0].args[0] if parts[0].target is operator.getitem else None
        if isinstance(split, fx.Node) and split.target == SPLIT_FEATURES:
            outputs = [user.args[1] for user in split.users]
            if all(part.args == (split, index) for index, part in enumerate(parts)) and len(outputs) == len(
                parts
            ):
                return argument(split)
        if len(parts) == 1:
            return parts[0]
        return self._emit(JOIN_FEATURES, parts, self._emit(aten.sym_size.int, parts[0], 0))

    def emit_launch(self) -> fx.Node:
        self._launch = self._emit(ALL_TO_ALL, self._sent, *self._splits, self._like.args[3])
        return self._launch

    def emit_received(self) -> None:
        received = self._emit(WAIT, self._launch)
        if self._is_gradient:
            self._give_gradients(received)
        else:
            self._give_embeddings(received)

    def _give_embeddings(self, received: fx.Node) -> None:
        totals = [sum(widths) for widths in zip(*(member.widths for member in self.members), strict=True)]
        sources = [rank for rank, total in enumerate(totals) if total]
        parts = [received]
        if len(sources) > 1:
            split = self._emit(
                aten.split_with_sizes.default, received, [self._splits[0][rank] for rank in sources]
            )
            parts = [self._emit(operator.getitem, split, index) for index in range(len(sources))]
        num_rows = self.members[0].num_rows
        blocks = {
            rank: self._emit(aten.view.default, part, [num_rows, totals[rank]])
            for rank, part in zip(sources, parts, strict=True)
        }
        ends = [
            [0, *accumulate(widths)]
            for widths in zip(*(member.widths for member in self.members), strict=True)
        ]
        for index, member in enumerate(self.members):
            pieces = [
                self._columns(blocks[rank], ends[rank][index], ends[rank][index + 1])
                for rank, width in enumerate(member.widths)
                if width
            ]
            if len(member.rows) == 1 < len(pieces):
                pieces = [self._emit(aten.cat.default, pieces, 1)]
            for node, piece in zip(member.rows, pieces, strict=True):
                self._replace(node, piece)

    def _give_gradients(self, received: fx.Node) -> None:
        for member in self.members:
            if not member.num_dims:
                empty = self._emit(aten.slice.Tensor, received, 0, 0, 0)
                next(iter(member.launch.users)).replace_all_uses_with(empty)
        if not self._own:
            return
        ends = [0, *accumulate(member.num_dims for member in self._own)]
        num_rows = self._emit(operator.floordiv, self._sizes.sum(self._splits[0]), ends[-1])
        block = self._emit(aten.view.default, received, [num_rows, ends[-1]])
        if (scale := self._own[0].scale) is not None:
            block = self._emit(aten.div.Tensor, block, scale)
        joined = self._joins()
        if joined is not None:
            joined.replace_all_uses_with(block)
            self._graph.graph.erase_node(joined)
        for index, member in enumerate(self._own):
            if not member.tables.users:
                continue
            columns = self._columns(block, ends[index], ends[index + 1])
            if all(user.target == JOIN_FEATURES for user in member.tables.users):
                member.tables.replace_all_uses_with(columns)
                continue
            if columns is not block:
                columns = self._emit(aten.clone.default, columns, memory_format=torch.contiguous_format)
            if member.tables.target not in _VIEWS:
                self._replaced.append((member.tables, columns))
                continue
            # The view stays: its shape may be told by other symbols, as the number of lengths.
            flat = self._emit(aten.view.default, columns, [-1])
            member.tables.replace_input_with(argument(member.tables), flat)

    def _joins(self) -> fx.Node | None:
        """Returns the operator that only joins again what arrived joined."""
        joined = _only_user(self._own[0].tables)
        if joined is None or joined.target != JOIN_FEATURES:
            return None
        return joined if joined.args[0] == [member.tables for member in self._own] else None

    def _columns(self, block: fx.Node, start: int, end: int) -> fx.Node:
        if (start, end) == (0, block.meta["val"].shape[1]):
            return block
        return self._emit(aten.slice.Tensor, block, 1, start, end)

    def _replace(self, node: fx.Node, columns: fx.Node) -> None:
        if columns.target == aten.slice.Tensor and any(
            user.target not in _TAKE_COLUMNS for user in node.users
        ):
            columns = self._emit(aten.clone.default, columns, memory_format=torch.contiguous_format)
            self._replaced.append((node, columns))
        else:
            node.replace_all_uses_with(columns)

    def erase(self) -> None:
        for node, columns in self._replaced:  # now that no node is inserted before one of them
            self._graph.replace(node, columns)
        for member in self.members:
            following = [member.launch]
            for node in following:
                following += node.users
            for node in reversed(following):
                self._graph.graph.erase_node(node)


# They read what is not contiguous as well as what is.
_TAKE_COLUMNS = (aten.cat.default, aten.stack.default, JOIN_FEATURES)
