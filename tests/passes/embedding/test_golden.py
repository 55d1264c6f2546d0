"""Each pass that moves or makes collectives, on a graph of some ten lines: the graph before and after.

The docstrings of the passes show the same. ``EXPECTTEST_ACCEPT=1`` writes both anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

pytest.importorskip("torchrec")
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.agreement import CollectiveSequence
from graphpasses.graph import Stage
from graphpasses.passes import (
    BucketAllToAll,
    BucketPooledAllToAll,
    DeduplicateLookups,
    DeduplicateSizes,
    EliminateSplitCat,
    FuseSizeTensors,
    OverlapAllToAll,
)
from tests.helpers.all_to_alls import capture, exchange
from tests.helpers.golden import golden, read, show

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def test_bucket_all_to_all() -> None:
    graph = read(
        """\
ids = batch('ids')  # i64[4]
weights = batch('weights')  # f32[4]
ids_sent = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
ids_received = wait(ids_sent)  # i64[4]
weights_sent = all_to_all(weights, [1, 3], [2, 2], group0)  # f32[4]
weights_received = wait(weights_sent)  # f32[4]
return ids_received, weights_received  # ids, weights
"""
    )
    assert_expected_inline(
        golden(BucketAllToAll(), graph),
        """\
ids = batch('ids')  # i64[4]
weights = batch('weights')  # f32[4]
pack_all_to_all = graphpasses.pack_all_to_all([ids, weights], [2, 2, 2, 2])  # u8[48]
exchanged = all_to_all(pack_all_to_all, [20, 28], [24, 24], group0)  # u8[48]
waited = wait(exchanged)  # u8[48]
unpack_all_to_all = graphpasses.unpack_all_to_all(waited, [2, 2, 1, 3], [], [0, 0], [i64, f32])
getitem = unpack_all_to_all[0]  # i64[4]
getitem_1 = unpack_all_to_all[1]  # f32[4]
return getitem, getitem_1  # ids, weights
""",
    )


def test_eliminate_split_cat() -> None:
    graph = read(
        """\
a = batch('a')  # f32[5, 2]
b = batch('b')  # f32[5, 6]
joined = aten.cat([a, b], 1)  # f32[5, 8]
parts = aten.split_with_sizes(joined, [4, 4], 1)
left = parts[0]  # f32[5, 4]
right = parts[1]  # f32[5, 4]
turned = aten.cat([right, left], 1)  # f32[5, 8]
return turned  # turned
"""
    )
    assert_expected_inline(
        golden(EliminateSplitCat(), graph),
        """\
a = batch('a')  # f32[5, 2]
b = batch('b')  # f32[5, 6]
slice = aten.slice(b, 1, 2, 6)  # f32[5, 4]
slice_1 = aten.slice(b, 1, 0, 2)  # f32[5, 2]
turned = aten.cat([slice, a, slice_1], 1)  # f32[5, 8]
return turned  # turned
""",
    )


def test_deduplicate_lookups() -> None:
    graph = read(
        """\
table = parameter('table')  # f32[9, 4]
ids = value('ids')  # i64[4]
sent = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
received = wait(sent)  # i64[4]
rows = aten.embedding(table, received)  # f32[4, 4]
sent_again = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
received_again = wait(sent_again)  # i64[4]
rows_again = aten.embedding(table, received_again)  # f32[4, 4]
scores = aten.mul(rows, rows_again)  # f32[4, 4]
return scores  # scores
""",
        Stage.JOINT,
    )
    assert_expected_inline(
        golden(DeduplicateLookups(), graph),
        """\
table = parameter('table')  # f32[9, 4]
ids = value('ids')  # i64[4]
sent = all_to_all(ids, [2, 2], [2, 2], group0)  # i64[4]
received = wait(sent)  # i64[4]
rows = aten.embedding(table, received)  # f32[4, 4]
scores = aten.mul(rows, rows)  # f32[4, 4]
return scores  # scores
""",
    )


def test_bucket_pooled_all_to_all() -> None:
    graph = read(
        """\
pooled = batch('pooled')  # f32[4, 6]
parts = graphpasses.split_features(pooled, [2, 4], [4, 4])
first = parts[0]  # f32[4, 2]
first_flat = aten.view(first, [-1])  # f32[8]
first_sent = all_to_all(first_flat, [4, 4], [4, 4], group0)  # f32[8]
first_received = wait(first_sent)  # f32[8]
first_columns = torchrec._split_1d_cat_2d(first_received, 2, [2, 2])  # f32[2, 4]
second = parts[1]  # f32[4, 4]
second_flat = aten.view(second, [-1])  # f32[16]
second_sent = all_to_all(second_flat, [8, 8], [8, 8], group0)  # f32[16]
second_received = wait(second_sent)  # f32[16]
second_columns = torchrec._split_1d_cat_2d(second_received, 2, [4, 4])  # f32[2, 8]
columns = aten.cat([first_columns, second_columns], 1)  # f32[2, 12]
return columns  # columns
"""
    )
    assert_expected_inline(
        golden(BucketPooledAllToAll(), graph),
        """\
pooled = batch('pooled')  # f32[4, 6]
sym_size = aten.sym_size.int(pooled, 0)  # 4
mul = operator.mul(sym_size, 6)  # 24
view = aten.view(pooled, [mul])  # f32[24]
exchanged = all_to_all(view, [12, 12], [12, 12], group0)  # f32[24]
waited = wait(exchanged)  # f32[24]
split_with_sizes = aten.split_with_sizes(waited, [12, 12])
getitem = split_with_sizes[0]  # f32[12]
getitem_1 = split_with_sizes[1]  # f32[12]
view_1 = aten.view(getitem, [2, 6])  # f32[2, 6]
view_2 = aten.view(getitem_1, [2, 6])  # f32[2, 6]
slice = aten.slice(view_1, 1, 0, 2)  # f32[2, 2]
slice_1 = aten.slice(view_2, 1, 0, 2)  # f32[2, 2]
cat = aten.cat([slice, slice_1], 1)  # f32[2, 4]
slice_2 = aten.slice(view_1, 1, 2, 6)  # f32[2, 4]
slice_3 = aten.slice(view_2, 1, 2, 6)  # f32[2, 4]
cat_1 = aten.cat([slice_2, slice_3], 1)  # f32[2, 8]
columns = aten.cat([cat, cat_1], 1)  # f32[2, 12]
return columns  # columns
""",
    )


def scalars(*sizes: Any) -> list[Tensor]:
    return [aten.scalar_tensor.default(size, dtype=torch.int64) for size in sizes]


def test_fuse_size_tensors() -> None:
    def step(x: Tensor) -> list[Tensor]:
        sizes = torch.stack(scalars(*x.shape))
        return [exchange(torch.stack([sizes, sizes], 1).view([4]), [2, 2], [2, 2])]

    graph = capture(step, torch.ones(5, 6))
    assert_expected_inline(
        show(graph),
        """\
input_0 = batch('input 0')  # f32[s75, s96]
sym_size = aten.sym_size.int(input_0, 0)  # s75
scalar_tensor = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
sym_size_1 = aten.sym_size.int(input_0, 1)  # s96
scalar_tensor_1 = aten.scalar_tensor(sym_size_1, dtype=i64)  # i64[]
stack = aten.stack([scalar_tensor, scalar_tensor_1])  # i64[2]
stack_1 = aten.stack([stack, stack], 1)  # i64[2, 2]
view = aten.view(stack_1, [4])  # i64[4]
exchanged = all_to_all(view, [2, 2], [2, 2], group0)  # i64[4]
waited = wait(exchanged)  # i64[4]
return waited  # output 0
""",
    )
    assert_expected_inline(
        golden(FuseSizeTensors(), graph),
        """\
input_0 = batch('input 0')  # f32[5, 6]
sym_size = aten.sym_size.int(input_0, 0)  # 5
sym_size_1 = aten.sym_size.int(input_0, 1)  # 6
size_tensor = graphpasses.size_tensor([sym_size, sym_size, sym_size_1, sym_size_1], i64, cpu)  # i64[4]
exchanged = all_to_all(size_tensor, [2, 2], [2, 2], group0)  # i64[4]
waited = wait(exchanged)  # i64[4]
return waited  # output 0
""",
    )


def test_deduplicate_sizes() -> None:
    def send(size: Any) -> Any:
        return exchange(torch.stack(scalars(size, size)), [1, 1], [1, 1])[1].item()

    def step(x: Tensor) -> list[Tensor]:
        return [x.new_zeros(send(x.shape[0])), x.new_zeros(send(x.shape[0]))]

    def both_say(self: CollectiveSequence, question: Any, facts: Any, groups: Any) -> Any:
        return [facts, facts]

    graph = capture(step, torch.ones(5))
    assert_expected_inline(
        show(graph),
        """\
input_0 = batch('input 0')  # f32[s75]
sym_size = aten.sym_size.int(input_0, 0)  # s75
scalar_tensor = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
scalar_tensor_1 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
stack = aten.stack([scalar_tensor, scalar_tensor_1])  # i64[2]
exchanged = all_to_all(stack, [1, 1], [1, 1], group0)  # i64[2]
waited = wait(exchanged)  # i64[2]
select = aten.select.int(waited, 0, 1)  # i64[]
local_scalar_dense = aten._local_scalar_dense(select)  # u0
new_zeros = aten.new_zeros(input_0, [local_scalar_dense], pin_memory=False)  # f32[u0]
scalar_tensor_2 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
scalar_tensor_3 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
stack_1 = aten.stack([scalar_tensor_2, scalar_tensor_3])  # i64[2]
exchanged_1 = all_to_all(stack_1, [1, 1], [1, 1], group0)  # i64[2]
waited_1 = wait(exchanged_1)  # i64[2]
select_1 = aten.select.int(waited_1, 0, 1)  # i64[]
local_scalar_dense_1 = aten._local_scalar_dense(select_1)  # u1
new_zeros_1 = aten.new_zeros(input_0, [local_scalar_dense_1], pin_memory=False)  # f32[u1]
return new_zeros, new_zeros_1  # output 0, output 1
""",
    )
    with mock.patch.object(CollectiveSequence, "agree", both_say):
        assert_expected_inline(
            golden(DeduplicateSizes(), graph),
            """\
input_0 = batch('input 0')  # f32[s75]
sym_size = aten.sym_size.int(input_0, 0)  # s75
scalar_tensor = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
scalar_tensor_1 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
stack = aten.stack([scalar_tensor, scalar_tensor_1])  # i64[2]
exchanged = all_to_all(stack, [1, 1], [1, 1], group0)  # i64[2]
waited = wait(exchanged)  # i64[2]
select = aten.select.int(waited, 0, 1)  # i64[]
local_scalar_dense = aten._local_scalar_dense(select)  # u0
new_zeros = aten.new_zeros(input_0, [local_scalar_dense], pin_memory=False)  # f32[u0]
scalar_tensor_2 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
scalar_tensor_3 = aten.scalar_tensor(sym_size, dtype=i64)  # i64[]
stack_1 = aten.stack([scalar_tensor_2, scalar_tensor_3])  # i64[2]
exchanged_1 = all_to_all(stack_1, [1, 1], [1, 1], group0)  # i64[2]
waited_1 = wait(exchanged_1)  # i64[2]
new_zeros_1 = aten.new_zeros(input_0, [local_scalar_dense], pin_memory=False)  # f32[u0]
return new_zeros, new_zeros_1  # output 0, output 1
""",
        )


def test_overlap_all_to_all() -> None:
    graph = read(
        """\
embeddings_grad = value('embeddings_grad')  # f32[4, 2]
x = value('x')  # f32[4, 4]
launch = all_to_all(embeddings_grad, [2, 2], [2, 2], group0)  # f32[4, 2]
arrived = wait(launch)  # f32[4, 2]
rows_grad = aten.div(arrived, 2)  # f32[4, 2]
weight_grad = aten.mm(x, x)  # f32[4, 4]
return rows_grad, weight_grad  # rows, weight
""",
        Stage.BACKWARD,
    )
    assert_expected_inline(
        golden(OverlapAllToAll(), graph),
        """\
embeddings_grad = value('embeddings_grad')  # f32[4, 2]
x = value('x')  # f32[4, 4]
launch = all_to_all(embeddings_grad, [2, 2], [2, 2], group0)  # f32[4, 2]
weight_grad = aten.mm(x, x)  # f32[4, 4]
arrived = wait(launch)  # f32[4, 2]
rows_grad = aten.div(arrived, 2)  # f32[4, 2]
return rows_grad, weight_grad  # rows, weight
""",
    )
