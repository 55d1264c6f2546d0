"""Which all-to-alls carry pooled embeddings, or their gradients, and from where to where.

TorchRec sends each module's pooled embeddings on their own, from the side of the tables to the side of the batch.
What is looked up in whole tables, or in some dims of them, arrives side by side. Of tables that are cut by rows, each
rank sends a part of every sum::

    view(tables) -> all_to_all -> wait -> _split_1d_cat_2d                             [rows, dims of all tables]
    tables -> all_to_all -> wait -> split_with_sizes -> +                              [rows, dims] of each rank

Gradients go the other way::

    _split_1d_cat_2d_backward_impl(gradient) -> all_to_all -> wait -> div -> view
    cat([gradient of each rank]) -> all_to_all -> wait -> div

The source is ``torchrec/distributed/comm_ops.py`` (``all2all_pooled_sync``, ``reduce_scatter_v_sync``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch.group_ranks import named_group
from graphpasses.graph import argument
from graphpasses.graph.nodes import collective_group
from graphpasses.graph.size_arithmetic import Size, size_expression

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default)
# By name: TorchRec defines them, if it is there.
_SPLIT_1D_CAT_2D = "torchrec._split_1d_cat_2d.default"
_SPLIT_1D_CAT_2D_BACKWARD = "torchrec._split_1d_cat_2d_backward_impl.default"


@dataclass(frozen=True)
class PooledAllToAll:
    """An all-to-all of pooled embeddings, or of their gradients."""

    launch: fx.Node
    is_gradient: bool  # whether it carries gradients, from the side of the batch to the side of the tables
    # What is received, or sent (gradients): one tensor, [rows of this rank's batch, dims of all ranks'
    # tables], or a tensor [rows of this rank's batch, dims of a rank's tables] for each rank.
    batch_side: tuple[fx.Node, ...]
    dims_by_rank: tuple[int, ...]  # how many of the dims belong to each rank's tables
    # What is sent, or received (gradients): [rows of all ranks' batches, dims of this rank's tables].
    table_side: fx.Node
    num_rows: Size = 0  # rows of this rank's batch, of embeddings
    scale: Any = None  # what received gradients are divided by; None if they are not
    unit: int = 1  # elements that a split of the all-to-all counts as one

    @property
    def num_dims(self) -> int:
        return self.dims_by_rank[named_group(str(collective_group(self.launch))).rank()]

    @property
    def splits(self) -> tuple[Sequence[Size], Sequence[Size]]:
        """What is received from and sent to each rank, in units."""
        return self.launch.args[1:3]  # type: ignore[return-value]

    @property
    def rows_by_rank(self) -> list[Any]:
        """The rows of each rank's batch, as expressions; this rank knows them if it has tables."""
        sizes = self.splits[0 if self.is_gradient else 1]
        return [_divide(size_expression(size) * self.unit, self.num_dims) for size in sizes]

    @property
    def batch(self) -> object:
        """A key: all-to-alls of one key carry the same kind of tensor, of the same batch as far as shapes tell."""
        value = self.table_side.meta["val"]
        own = size_expression(self.batch_side[0].meta["val"].shape[0])
        total = sum(self.rows_by_rank) if self.num_dims else size_expression(value.shape[0])
        kind = self.is_gradient, collective_group(self.launch), value.dtype, value.device, self.scale
        return kind, own, total


def batch_classes(members: Sequence[PooledAllToAll | None]) -> list[int]:
    """Returns a number for each all-to-all: those of one number have the same batch, so they can become one.

    It is -1 for None, and for a batch that has the size, but not the parts, of one before it.
    """
    number_of: dict[object, int] = {}
    rows_of: dict[object, list[object]] = {}
    for member in members:
        if member is not None and member.num_dims:
            rows_of.setdefault(member.batch, member.rows_by_rank)
    return [
        -1
        if member is None or (member.num_dims and member.rows_by_rank != rows_of[member.batch])
        else number_of.setdefault(member.batch, len(number_of))
        for member in members
    ]


def _divide(size: Any, num_dims: int) -> Any:
    return size // num_dims if isinstance(size, int) else sympy.expand(size / num_dims)


def read_pooled_all_to_all(launch: fx.Node) -> PooledAllToAll | None:
    """Returns what an all-to-all carries, if it is pooled embeddings or their gradients; its wait alone reads it."""
    return _read_embeddings(launch) or _read_sums(launch) or _read_gradients(launch)


def _read_embeddings(launch: fx.Node) -> PooledAllToAll | None:
    rows, flat = _only_user(_only_user(launch)), argument(launch)
    if rows is None or str(rows.target) != _SPLIT_1D_CAT_2D or flat.target not in VIEWS:
        return None
    arguments: Any = rows.args
    _, num_rows, dims = arguments
    return _checked(PooledAllToAll(launch, False, (rows,), tuple(dims), argument(flat), num_rows=num_rows))


def _read_sums(launch: fx.Node) -> PooledAllToAll | None:
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


def _read_gradients(launch: fx.Node) -> PooledAllToAll | None:
    flat, received = argument(launch), next(iter(launch.users))
    scale = None
    divided = _only_user(received)
    if divided is not None and divided.target == aten.div.Tensor and not isinstance(divided.args[1], fx.Node):
        received, scale = divided, divided.args[1]
    if flat.target == aten.cat.default and flat.args[1:] in ((), (0,)):
        return _parts(launch, True, tuple(flat.args[0]), received, scale=scale)  # type: ignore[arg-type]
    tables = _only_user(received)
    if str(flat.target) != _SPLIT_1D_CAT_2D_BACKWARD or tables is None or tables.target not in VIEWS:
        return None
    dims: Any = flat.args[1]
    return _checked(PooledAllToAll(launch, True, (argument(flat),), tuple(dims), tables, scale=scale))


def _parts(
    launch: fx.Node, is_gradient: bool, parts: tuple[fx.Node, ...], table_side: fx.Node, **details: Any
) -> PooledAllToAll | None:
    """Returns what has a tensor of equal shape for each rank, which an all-to-all of rows sends or receives."""
    splits: Sequence[Size] = launch.args[2 if is_gradient else 1]  # type: ignore[assignment]
    shapes = {tuple(map(size_expression, part.meta["val"].shape)) for part in parts}
    (shape, *others) = shapes
    if others or len(shape) != 2 or not isinstance(shape[1], int):
        return None
    if len(parts) != len(splits) or any(size_expression(size) != shape[0] for size in splits):
        return None
    dims = (shape[1],) * len(parts)
    return _checked(PooledAllToAll(launch, is_gradient, parts, dims, table_side, unit=shape[1], **details))


def _checked(member: PooledAllToAll) -> PooledAllToAll | None:
    shape = member.table_side.meta["val"].shape
    is_known = len(shape) == 2 and isinstance(shape[1], int) and shape[1] == member.num_dims
    return member if is_known and any(member.dims_by_rank) else None


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
