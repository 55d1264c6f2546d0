"""Pooled embeddings of one batch sent as one tensor, with the dims of all modules side by side."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphpasses.agreement import CollectiveSequence, Question, breaks_class, common_classes
from graphpasses.analysis.levels import grouped
from graphpasses.embedding.emit_pooled_all_to_all import MergedPooledAllToAll
from graphpasses.embedding.torchrec.pooled_all_to_all import PooledAllToAll, batch_classes, read_pooled_all_to_all
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.nodes import collective_group, wait_of
from graphpasses.passes.all_to_all_buckets import plan_launch_order
from graphpasses.passes.runner import GraphPass, Numerics

# Those of one key have the same batch on every rank.
Classes = Mapping[fx.Node, tuple[PooledAllToAll, Hashable]]


def _agree_on_batches(sequence: CollectiveSequence) -> Classes:
    """Returns what carries pooled embeddings, or gradients, on every rank, with a key of the batch."""
    members = {launch: read_pooled_all_to_all(launch) for launch in sequence.all_to_alls}
    agreed: dict[fx.Node, tuple[PooledAllToAll, Hashable]] = {}
    for group in sequence.groups:
        launches = [launch for launch in members if collective_group(launch) == group]
        if not launches:
            continue
        own = batch_classes([members[launch] for launch in launches])
        keys = sequence.agree(_SAME_BATCH, own, [group])
        for launch, key in zip(launches, keys, strict=True):
            if key >= 0 and (member := members[launch]) is not None:
                agreed[launch] = member, (group, key)
    return agreed


def _contradiction(agreed: list[int], own: list[int]) -> str:
    if not breaks_class(agreed, own):
        return ""
    return (
        "compiled the model again, and now modules have batches of different sizes, of which it told the other ranks "
        "that they are equal"
    )


_SAME_BATCH: Question[list[int], list[int]] = Question(
    "bucket-pooled-all-to-all", "pooled embeddings", common_classes, _contradiction
)


def _group(bucket: Sequence[fx.Node], classes: Classes) -> list[list[PooledAllToAll]]:
    """Returns which all-to-alls of a bucket become one."""
    found = grouped(filter(classes.__contains__, bucket), key=lambda launch: classes[launch][1])
    return [[classes[launch][0] for launch in launches] for launches in found]


def _apply(graph: TrainGraph, bucket: Sequence[fx.Node], groups: Sequence[Sequence[PooledAllToAll]]) -> None:
    """Merges the groups of a bucket, whose launches are adjacent, and whose waits are, too."""
    merges = [MergedPooledAllToAll(graph, members) for members in groups]
    with graph.graph.inserting_before(bucket[0]):
        for merged in merges:
            merged.emit_sent()
        for merged in merges:
            merged.emit_launch()
    with graph.graph.inserting_before(wait_of(bucket[0])):
        for merged in merges:
            merged.emit_received()
    for merged in merges:
        merged.erase_members()


@dataclass(frozen=True)
class BucketPooledAllToAll(GraphPass):
    """Sends the pooled embeddings of several modules as one tensor, and their gradients.

    What the pass changes::

          pooled = batch('pooled')  # f32[4, 6]
        - parts = graphpasses.split_features(pooled, [2, 4], [4, 4])
        - first = parts[0]  # f32[4, 2]
        - first_flat = aten.view(first, [-1])  # f32[8]
        - first_sent = all_to_all(first_flat, [4, 4], [4, 4], group0)  # f32[8]
        - first_received = wait(first_sent)  # f32[8]
        - first_columns = torchrec._split_1d_cat_2d(first_received, 2, [2, 2])  # f32[2, 4]
        - second = parts[1]  # f32[4, 4]
        - second_flat = aten.view(second, [-1])  # f32[16]
        - second_sent = all_to_all(second_flat, [8, 8], [8, 8], group0)  # f32[16]
        - second_received = wait(second_sent)  # f32[16]
        - second_columns = torchrec._split_1d_cat_2d(second_received, 2, [4, 4])  # f32[2, 8]
        - columns = aten.cat([first_columns, second_columns], 1)  # f32[2, 12]
        + sym_size = aten.sym_size.int(pooled, 0)  # 4
        + mul = operator.mul(sym_size, 6)  # 24
        + view = aten.view(pooled, [mul])  # f32[24]
        + exchanged = all_to_all(view, [12, 12], [12, 12], group0)  # f32[24]
        + waited = wait(exchanged)  # f32[24]
        + split_with_sizes = aten.split_with_sizes(waited, [12, 12])
        + getitem = split_with_sizes[0]  # f32[12]
        + getitem_1 = split_with_sizes[1]  # f32[12]
        + view_1 = aten.view(getitem, [2, 6])  # f32[2, 6]
        + view_2 = aten.view(getitem_1, [2, 6])  # f32[2, 6]
        + slice = aten.slice(view_1, 1, 0, 2)  # f32[2, 2]
        + slice_1 = aten.slice(view_2, 1, 0, 2)  # f32[2, 2]
        + cat = aten.cat([slice, slice_1], 1)  # f32[2, 4]
        + slice_2 = aten.slice(view_1, 1, 2, 6)  # f32[2, 4]
        + slice_3 = aten.slice(view_2, 1, 2, 6)  # f32[2, 4]
        + cat_1 = aten.cat([slice_2, slice_3], 1)  # f32[2, 8]
        + columns = aten.cat([cat, cat_1], 1)  # f32[2, 12]
          return columns  # columns

    The dims of what TorchRec sends per module and sharding type lie side by side in one tensor, if they have the same
    batch, from the lookup to where they are joined: nothing is copied on the way, as ``bucket-all-to-all`` does
    twice. All-to-alls that depend on each other stay apart. All ranks must compile the same model, at the same time:
    they exchange which batches are the same, see :mod:`graphpasses.agreement`.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again what it cannot send as agreed.

    Example:
        >>> names = [p.name for p in graphpasses.recommender_pipeline().passes]
        >>> names.index("bucket-pooled-all-to-all") < names.index("bucket-all-to-all")
        True
    """

    name = "bucket-pooled-all-to-all"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"deduplicate-lookups", "deduplicate-sizes"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of all-to-alls made."""
        sequence = CollectiveSequence(graph)
        classes = _agree_on_batches(sequence)
        if not classes:
            return 0
        order = plan_launch_order(graph, sequence, pass_name=self.name)
        groups = {bucket: found for bucket in order.buckets if (found := _group(bucket, classes))}
        if not groups:
            return 0
        order.apply(graph)
        for bucket, of_bucket in groups.items():
            _apply(graph, bucket, of_bucket)
        return sum(map(len, groups.values()))
