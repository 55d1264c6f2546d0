"""Each pass that moves or makes lookups, on a graph of some ten lines: the graph before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

pytest.importorskip("torchrec")
from tests.helpers.tables import tables  # loads TorchRec without its warnings  # isort: skip
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.graph import Stage
from graphpasses.ops.reduce_scatter_v import REDUCE_SCATTER_V
from graphpasses.passes import (
    FuseTableUpdates,
    FuseTBE,
    HoistInputDists,
    LowerEmbeddingBags,
    ReinplaceTBEUpdates,
)
from tests.helpers.golden import compiled, golden, show


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def test_hoist_input_dists() -> None:
    def step(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
        world = dist.group.WORLD
        a_ids = all_to_all_single(a, None, None, world)
        a_out = REDUCE_SCATTER_V(table[a_ids], [2, 2], 0, world.group_name, 2)
        b_ids = all_to_all_single(b, None, None, world)
        b_out = REDUCE_SCATTER_V(table[b_ids], [2, 2], 0, world.group_name, 2)
        return a_out + b_out

    inputs = torch.arange(4), torch.arange(4), torch.ones(4, 2, requires_grad=True)
    before, after = compiled(HoistInputDists(), step, *inputs, stage=Stage.DYNAMO)
    assert_expected_inline(
        show(before),
        """\
a = value('a')  # i64[4]
table = value('table')  # f32[4, 2]
b = value('b')  # i64[4]
tensor = all_to_all(a, [2, 2], [2, 2], '0')  # i64[4]
a_ids = wait(tensor)  # i64[4]
getitem = table[a_ids]  # f32[4, 2]
a_out = graphpasses.reduce_scatter_v(getitem, [2, 2], 0, '0', 2)  # f32[2, 2]
tensor_1 = all_to_all(b, [2, 2], [2, 2], '0')  # i64[4]
b_ids = wait(tensor_1)  # i64[4]
getitem_1 = table[b_ids]  # f32[4, 2]
b_out = graphpasses.reduce_scatter_v(getitem_1, [2, 2], 0, '0', 2)  # f32[2, 2]
add = operator.add(a_out, b_out)  # f32[2, 2]
return add  # output 0
""",
    )
    assert_expected_inline(
        golden(HoistInputDists(), before, after),
        """\
a = value('a')  # i64[4]
table = value('table')  # f32[4, 2]
b = value('b')  # i64[4]
tensor = all_to_all(a, [2, 2], [2, 2], '0')  # i64[4]
a_ids = wait(tensor)  # i64[4]
getitem = table[a_ids]  # f32[4, 2]
tensor_1 = all_to_all(b, [2, 2], [2, 2], '0')  # i64[4]
b_ids = wait(tensor_1)  # i64[4]
getitem_1 = table[b_ids]  # f32[4, 2]
a_out = graphpasses.reduce_scatter_v(getitem, [2, 2], 0, '0', 2)  # f32[2, 2]
b_out = graphpasses.reduce_scatter_v(getitem_1, [2, 2], 0, '0', 2)  # f32[2, 2]
add = operator.add(a_out, b_out)  # f32[2, 2]
return add  # output 0
""",
    )


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = tables([4]), tables([8])

    def forward(self, a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> Tensor:
        return torch.cat([self.a(a, a_offsets), self.b(b, b_offsets)], 1)


def test_fuse_tbe() -> None:
    inputs = torch.arange(6), torch.tensor([0, 3, 6]), torch.arange(6), torch.tensor([0, 4, 6])
    before, after = compiled(FuseTBE(), TwoTables(), *inputs, stage=Stage.DYNAMO)
    assert_expected_inline(
        show(before),
        """\
a = value('a')  # i64[6]
a_offsets = value('a_offsets')  # i64[3]
a_weights_host = parameter('a.weights_host')  # f32[80]
b = value('b')  # i64[6]
b_offsets = value('b_offsets')  # i64[3]
b_weights_host = parameter('b.weights_host')  # f32[160]
indices = a.clone()  # i64[6]
offsets = a_offsets.to(dtype=i64)  # i64[3]
bounds_check_indices = fbgemm.bounds_check_indices(indices, offsets, ...)
lookup = fbgemm.lookup_sgd([a_weights_host], indices, offsets, ...)  # f32[2, 4]
indices_1 = b.clone()  # i64[6]
offsets_1 = b_offsets.to(dtype=i64)  # i64[3]
bounds_check_indices_1 = fbgemm.bounds_check_indices(indices_1, offsets_1, ...)
lookup_1 = fbgemm.lookup_sgd([b_weights_host], indices_1, offsets_1, ...)  # f32[2, 8]
cat = torch.cat([lookup, lookup_1], 1)  # f32[2, 12]
return cat  # output 0
""",
    )
    assert_expected_inline(
        golden(FuseTBE(), before, after),
        """\
a = value('a')  # i64[6]
a_offsets = value('a_offsets')  # i64[3]
a_weights_host = parameter('a.weights_host')  # f32[80]
b = value('b')  # i64[6]
b_offsets = value('b_offsets')  # i64[3]
b_weights_host = parameter('b.weights_host')  # f32[160]
indices = a.clone()  # i64[6]
offsets = a_offsets.to(dtype=i64)  # i64[3]
bounds_check_indices = fbgemm.bounds_check_indices(indices, offsets, ...)
indices_1 = b.clone()  # i64[6]
offsets_1 = b_offsets.to(dtype=i64)  # i64[3]
bounds_check_indices_1 = fbgemm.bounds_check_indices(indices_1, offsets_1, ...)
join_bags = graphpasses.join_bags([indices, indices_1], [offsets, offsets_1], [1, 1], ['a', 'b'])
getitem = join_bags[0]  # i64[12]
getitem_1 = join_bags[1]  # i64[2, 2]
view = aten.view(getitem_1, [-1])  # i64[4]
asynchronous_complete_cumsum = fbgemm.asynchronous_complete_cumsum(view)  # i64[5]
lookup = fbgemm.lookup_sgd(getitem, asynchronous_complete_cumsum, ...)  # f32[2, 12]
sym_size = aten.sym_size.int(offsets, 0)  # 3
sub = operator.sub(sym_size, 1)  # 2
floordiv = operator.floordiv(sub, 1)  # 2
sym_size_1 = aten.sym_size.int(offsets_1, 0)  # 3
sub_1 = operator.sub(sym_size_1, 1)  # 2
floordiv_1 = operator.floordiv(sub_1, 1)  # 2
split_features = graphpasses.split_features(lookup, [4, 8], [floordiv, floordiv_1])
getitem_2 = split_features[0]  # f32[2, 4]
getitem_3 = split_features[1]  # f32[2, 8]
cat = torch.cat([getitem_2, getitem_3], 1)  # f32[2, 12]
return cat  # output 0
""",
    )


class TwoBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.EmbeddingBag(10, 4, mode="sum"), nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([self.a(ids, offsets), self.b(ids, offsets)], 1)


def test_lower_embedding_bags() -> None:
    model = TwoBags()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    inputs = torch.arange(6), torch.tensor([0, 3])
    before, after = compiled(LowerEmbeddingBags(), model, *inputs, stage=Stage.DYNAMO)
    assert_expected_inline(
        show(before),
        """\
a_weight = parameter('a.weight')  # f32[10, 4]
ids = value('ids')  # i64[6]
offsets = value('offsets')  # i64[2]
b_weight = parameter('b.weight')  # f32[20, 4]
embedding_bag = torch.nn.functional.embedding_bag(ids, a_weight, offsets, ...)  # f32[2, 4]
embedding_bag_1 = torch.nn.functional.embedding_bag(ids, b_weight, offsets, ...)  # f32[2, 4]
cat = torch.cat([embedding_bag, embedding_bag_1], 1)  # f32[2, 8]
return cat  # output 0
""",
    )
    assert_expected_inline(
        golden(LowerEmbeddingBags(), before, after),
        """\
a_weight = parameter('a.weight')  # f32[10, 4]
ids = value('ids')  # i64[6]
offsets = value('offsets')  # i64[2]
b_weight = parameter('b.weight')  # f32[20, 4]
pack_bags = graphpasses.pack_bags([ids, ids], [offsets, offsets], [10, 20], ['a.weight', 'b.weight'], False)
getitem = pack_bags[0]  # i64[12]
getitem_1 = pack_bags[1]  # i64[5]
lookup = fbgemm.lookup_sgd(getitem, getitem_1, ...)  # f32[2, 8]
return lookup  # output 0
""",
    )


def test_reinplace_tbe_updates() -> None:
    def step(ids: Tensor, rows: Tensor, offsets: Tensor, warning: Tensor) -> Tensor:
        torch.ops.fbgemm.bounds_check_indices(rows, ids, offsets, 2, warning)
        return ids * 2

    inputs = torch.arange(4), torch.tensor([5]), torch.tensor([0, 4]), torch.zeros(1).long()
    before, after = compiled(ReinplaceTBEUpdates(), step, *inputs, stage=Stage.FORWARD)
    assert_expected_inline(
        show(before),
        """\
rows = value('rows')  # i64[1]
ids = value('ids')  # i64[4]
offsets = value('offsets')  # i64[2]
warning = value('warning')  # i64[1]
written = auto_functionalized_v2(fbgemm.bounds_check_indices, rows, [ids, offsets, warning], ...)
getitem_1 = written[1]  # i64[4]
getitem_2 = written[2]  # i64[2]
getitem_3 = written[3]  # i64[1]
mul = aten.mul(getitem_1, 2)  # i64[4]
copy = aten.copy_.default(ids, getitem_1)  # i64[4]
copy_1 = aten.copy_.default(offsets, getitem_2)  # i64[2]
copy_2 = aten.copy_.default(warning, getitem_3)  # i64[1]
return mul  # PlainAOTOutput(idx=0)
""",
    )
    assert_expected_inline(
        golden(ReinplaceTBEUpdates(), before, after),
        """\
rows = value('rows')  # i64[1]
ids = value('ids')  # i64[4]
offsets = value('offsets')  # i64[2]
warning = value('warning')  # i64[1]
bounds_check_indices = fbgemm.bounds_check_indices(rows, ids, offsets, warning, ...)
mul = aten.mul(ids, 2)  # i64[4]
return mul  # PlainAOTOutput(idx=0)
""",
    )


def test_fuse_table_updates() -> None:
    rows, ids = nn.Embedding(10, 2), torch.tensor([1, 2, 3])
    optimizer = torch.optim.SGD(rows.parameters())
    graph = capture_train_step(lambda model, ids: model(ids).sum(), rows, ids, optimizer=optimizer)
    assert_expected_inline(
        golden(FuseTableUpdates(), graph),
        """\
weight = parameter('weight')  # f32[10, 2]
batch_0 = batch('batch[0]')  # i64[3]
lr_of_group_0 = hyperparameter('group 0', 'lr')  # zuf0
embedding = aten.embedding(weight, batch_0)  # f32[3, 2]
sum = aten.sum(embedding)  # f32[]
ones_like = aten.ones_like(sum, pin_memory=False, memory_format=torch.preserve_format)  # f32[]
# backward
expand = aten.expand(ones_like, [3, 2])  # f32[3, 2]
update_rows = graphpasses.update_rows(weight, [expand], [batch_0], lr_of_group_0, ...)
return sum, None  # loss, gradient of weight
""",
    )
