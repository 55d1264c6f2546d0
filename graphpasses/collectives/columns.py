"""Pooled embeddings of several modules that travel side by side: row for row as one tensor of more columns.

TorchRec sends each module's embeddings on their own: ``[rows, dims]`` of this rank's tables, rows by rank that they
are for; what arrives, ``[rows, dims]`` of each rank's tables, becomes columns. Those of modules that have the same
batch can be columns of one tensor from the lookup that computes them to the tensor that they are joined to, and
nothing is copied on the way; members that are packed (see :mod:`.packing`) lie one behind the other.

::

    split_features(pooled) -> view -> all_to_all -> wait -> _split_1d_cat_2d      for each module
        ->   view(pooled) -> all_to_all -> wait -> view -> slice                  one for all
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphpasses._torch.effects import collective_group
from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.symbols import expression
from graphpasses.collectives.launches import Launches
from graphpasses.collectives.sizes import Size, SizeArithmetic
from graphpasses.embedding.joined_lookup import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument

__all__ = ["Columns", "agree_on_columns", "merge_columns"]

torch.library.define(
    "graphpasses::pack_columns",
    "(Tensor[] members, int[] widths) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_PACK = torch.ops.graphpasses.pack_columns.default
aten = torch.ops.aten


def _pack_columns(members: list[Tensor], widths: list[int]) -> Tensor:
    """Lays the columns for each rank behind those for the one before; ``widths`` has a row per member."""
    num_ranks, num_rows = len(widths) // len(members), members[0].shape[0]
    parts = [
        member.split_with_sizes(widths[index * num_ranks : (index + 1) * num_ranks], 1)
        for index, member in enumerate(members)
    ]
    totals = [sum(widths[rank::num_ranks]) for rank in range(num_ranks)]
    packed = members[0].new_empty(num_rows * sum(totals))
    places = packed.split_with_sizes([num_rows * total for total in totals])
    for rank, (place, total) in enumerate(zip(places, totals, strict=True)):
        if total:
            torch.cat([part[rank] for part in parts], 1, out=place.view(num_rows, total))
    return packed


def _fake_pack_columns(members: list[Tensor], widths: list[int]) -> Tensor:
    return members[0].new_empty(members[0].shape[0] * sum(widths))


torch.library.impl("graphpasses::pack_columns", "default", _pack_columns)
torch.library.register_fake("graphpasses::pack_columns", _fake_pack_columns)


@dataclass(frozen=True)
class Columns:
    """A member: an all-to-all of pooled embeddings, or of their gradients.

    Args:
        launch: the all-to-all.
        is_gradient: whether gradients travel, from the columns to the tables.
        rows: columns' side: the tensor that is received, or sent (gradients).
        widths: how many of the columns belong to each rank's tables.
        scale: what received gradients are divided by; None if they are not.
        tables: tables' side: what is sent, or received (gradients), [rows of all ranks, dims of this rank].
    """

    launch: fx.Node
    is_gradient: bool
    rows: fx.Node
    widths: tuple[int, ...]
    tables: fx.Node
    scale: Any = None

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
        """Elements received from and sent to each rank."""
        return self.launch.args[1:3]  # type: ignore[return-value]

    @property
    def rows_by_rank(self) -> Sequence[Size]:
        """Elements on the tables' side that belong to each rank."""
        return self.splits[0 if self.is_gradient else 1]


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
            rows_of.setdefault(_batches(member), _by_rank(member))
    classes = {}
    for launch, member in columns.items():
        if member is None or (member.num_dims and _by_rank(member) != rows_of[_batches(member)]):
            classes[launch] = -1
        else:
            classes[launch] = number_of.setdefault(_batches(member), len(number_of))
    return classes


def _batches(member: Columns) -> object:
    """Returns a key, equal for members whose batches have the same sizes, as far as the tables' side tells."""
    if member.num_dims:
        num_rows = _divide(sum(map(_expression, member.rows_by_rank)), member.num_dims)
    else:
        num_rows = _expression(member.tables.meta["val"].shape[0])
    return member.kind, _expression(member.rows.meta["val"].shape[0]), num_rows


def _by_rank(member: Columns) -> list[object]:
    return [_divide(_expression(size), member.num_dims) for size in member.rows_by_rank]


def _expression(size: Any) -> Any:
    return expression(size.meta["val"] if isinstance(size, fx.Node) else size)


def _divide(size: Any, num_dims: int) -> Any:
    return size // num_dims if isinstance(size, int) else sympy.expand(size / num_dims)


def _read(launch: fx.Node) -> Columns | None:
    """Returns what an all-to-all carries, if it is pooled embeddings or their gradients."""
    return _read_embeddings(launch) or _read_gradients(launch)


def _read_embeddings(launch: fx.Node) -> Columns | None:
    rows, flat = _only_user(_only_user(launch)), argument(launch)
    if rows is None or str(rows.target) != _TO_COLUMNS or flat.target not in _VIEWS:
        return None
    return _checked(Columns(launch, False, rows, _numbers(rows.args[2]), argument(flat)))


def _read_gradients(launch: fx.Node) -> Columns | None:
    flat, received = argument(launch), _only_user(_only_user(launch))
    if str(flat.target) != _FROM_COLUMNS or received is None:
        return None
    tables: fx.Node | None = received
    scale = None
    if received.target == aten.div.Tensor and not isinstance(received.args[1], fx.Node):
        tables, scale = _only_user(received), received.args[1]
    if tables is None or tables.target not in _VIEWS:
        return None
    return _checked(Columns(launch, True, argument(flat), _numbers(flat.args[1]), tables, scale))


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
        self.members = members[::-1] if members[0].is_gradient else members
        self._is_gradient = members[0].is_gradient
        self._own = [member for member in self.members if member.num_dims]
        self._sizes = SizeArithmetic(graph, like=self._like)

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.emit(target, args, kwargs, like=self._like)

    def emit_sent(self) -> None:
        self._splits = [
            [self._sizes.sum(sizes) for sizes in zip(*splits, strict=True)]
            for splits in ([member.splits[index] for member in self.members] for index in (0, 1))
        ]
        if self._is_gradient:
            widths = [width for member in self.members for width in member.widths]
            self._sent = self._emit(_PACK, [member.rows for member in self.members], widths)
        elif self._own:
            joined = self._joined()
            # As a node of its own, so that AOTAutograd can give backward the symbol in the shapes that it keeps.
            num_rows = self._emit(aten.sym_size.int, joined, 0)
            num_dims = sum(member.num_dims for member in self._own)
            self._sent = self._emit(aten.view.default, joined, [self._sizes.product(num_rows, num_dims)])
        else:
            self._sent = argument(self.members[0].launch)  # empty

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
        num_rows = self.members[0].rows.args[1]
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
            rows = pieces[0] if len(pieces) == 1 else self._emit(aten.cat.default, pieces, 1)
            self._replace(member.rows, rows)

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
            # The view stays: its shape may be told by other symbols, as the number of lengths.
            if columns is not block:
                columns = self._emit(aten.clone.default, columns, memory_format=torch.contiguous_format)
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
            columns.meta["val"] = node.meta["val"]  # whose storage the values of views that follow share
        node.replace_all_uses_with(columns)

    def erase(self) -> None:
        for member in self.members:
            following = [member.launch]
            while users := list(following[-1].users):
                (user,) = users
                following.append(user)
            for node in reversed(following):
                self._graph.graph.erase_node(node)


# They read what is not contiguous as well as what is.
_TAKE_COLUMNS = (aten.cat.default, JOIN_FEATURES)
