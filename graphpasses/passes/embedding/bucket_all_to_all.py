"""Independent all-to-alls of one group launched as one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import fx

from graphpasses.agreement import CollectiveSequence
from graphpasses.graph import ALL_TO_ALL, WAIT, Stage, TrainGraph, argument
from graphpasses.graph.nodes import wait_of
from graphpasses.graph.size_arithmetic import Size, SizeArithmetic
from graphpasses.ops.pack_all_to_all import PACK, UNPACK, packed_dtype
from graphpasses.passes.all_to_all_buckets import plan_launch_order
from graphpasses.passes.runner import GraphPass, Numerics


def _apply(graph: TrainGraph, members: Sequence[fx.Node]) -> None:
    """Replaces adjacent all-to-alls, and their waits, which are adjacent too, by one."""
    inputs = [argument(member) for member in members]
    waits = [wait_of(member) for member in members]
    output_splits, input_splits = ([member.args[index] for member in members] for index in (1, 2))
    dtypes = [node.meta["val"].dtype for node in inputs]
    dtype = packed_dtype(dtypes)
    first, group = members[0], members[0].args[3]
    with graph.graph.inserting_before(first):
        sizes = SizeArithmetic(graph, like=first)
        rows = [sizes.row_shape(node) for node in inputs]
        units = [1 if own == dtype else own.itemsize for own in dtypes]
        row_sizes = [reduce(sizes.product, row, unit) for row, unit in zip(rows, units, strict=True)]
        totals = [
            [sizes.dot(splits, row_sizes) for splits in zip(*of_members, strict=True)]
            for of_members in (output_splits, input_splits)
        ]
        packed = graph.emit(PACK, (inputs, _flat(input_splits)), like=first)
        launched = graph.emit(ALL_TO_ALL, (packed, *totals, group), like=first)
    with graph.graph.inserting_before(waits[0]):
        received = graph.emit(WAIT, (launched,), like=waits[0])
        shapes = (_flat(output_splits), _flat(rows), [len(row) for row in rows], dtypes)
        unpacked = graph.emit(UNPACK, (received, *shapes), like=waits[0])
        outputs = [graph.emit(operator.getitem, (unpacked, index), like=wait) for index, wait in enumerate(waits)]
    for wait, output in zip(waits, outputs, strict=True):
        graph.replace(wait, output)
    for node in members:
        graph.graph.erase_node(node)


def _flat(lists: Iterable[Any]) -> list[Size]:
    return [item for items in lists for item in items]


@dataclass(frozen=True)
class BucketAllToAll(GraphPass):
    """Launches independent all-to-alls of one process group as one.

    What the pass changes::

          ids = batch('ids')  # i64[4]
          weights = batch('weights')  # f32[4]
        - ids_sent = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
        - ids_received = wait(ids_sent)  # i64[4]
        - weights_sent = all_to_all(weights, [1, 3], [2, 2], group0)  # f32[4]
        - weights_received = wait(weights_sent)  # f32[4]
        - return ids_received, weights_received  # ids, weights
        + pack_all_to_all = graphpasses.pack_all_to_all([ids, weights], [2, 2, 2, 2])  # u8[48]
        + exchanged = all_to_all(pack_all_to_all, [20, 28], [24, 24], group0)  # u8[48]
        + waited = wait(exchanged)  # u8[48]
        + unpack_all_to_all = graphpasses.unpack_all_to_all(waited, [2, 2, 1, 3], [], [0, 0], [i64, f32])
        + getitem = unpack_all_to_all[0]  # i64[4]
        + getitem_1 = unpack_all_to_all[1]  # f32[4]
        + return getitem, getitem_1  # ids, weights

    Of TorchRec's, one per module, sharding type and tensor, it leaves one for all splits, one for all lengths, values
    and weights, one for all pooled embeddings, and one for their gradients. Splits may be dynamic, dtypes and row
    shapes may differ. All ranks must compile the same model, at the same time: they exchange what depends on what,
    see :mod:`graphpasses.agreement`.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again what it cannot launch as agreed.

    Example:
        >>> from graphpasses.graph import ALL_TO_ALL, WAIT
        >>> def loss_fn(model, ids, weights):
        ...     group, splits = dist.group.WORLD.group_name, [1, 1]
        ...     ids, weights = (WAIT(ALL_TO_ALL(x, splits, splits, group)) for x in (ids, weights))
        ...     return (model(weights) + ids).sum()
        >>> with fake_process_group(2):
        ...     step = graphpasses.capture_train_step(loss_fn, nn.Linear(2, 2), torch.arange(2), torch.ones(2))
        ...     print(step.collectives(), graphpasses.Pipeline((BucketAllToAll(),)).run(step).collectives())
        {'all_to_all_single': 2} {'all_to_all_single': 1}
    """

    name = "bucket-all-to-all"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"deduplicate-lookups", "deduplicate-sizes", "bucket-pooled-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of buckets made."""
        sequence = CollectiveSequence(graph)
        if not sequence.all_to_alls:
            return 0
        order = plan_launch_order(graph, sequence, pass_name=self.name)
        if order.buckets:
            order.apply(graph)
        for bucket in order.buckets:
            _apply(graph, bucket)
        return len(order.buckets)
