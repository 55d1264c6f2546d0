"""Each pass of the FSDP pipeline on a graph of some ten lines: the graph before, and what the pass makes of it.

The docstrings of the passes show the same. ``EXPECTTEST_ACCEPT=1`` writes both anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.fsdp import BucketPlan
from graphpasses.passes import (
    BucketFSDPCollectives,
    CanonicalReductions,
    CoalesceGradReductions,
    DeduplicateShared,
    PrefetchCollectives,
    ReshardAfterForward,
    ScheduleCollectives,
    UpdateInBackward,
)
from graphpasses.scale import Speeds, Wire
from tests.helpers.golden import golden, read

LAYER = BucketPlan.from_modules([["layer"]])


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def test_deduplicate_shared() -> None:
    graph = read(
        """\
emb = parameter('emb.weight')  # f32[2, 4]
head = parameter('head.weight', same_as='emb.weight')  # f32[2, 4]
emb_gathered = all_gather(emb, 2, group0)  # f32[4, 4]
emb_whole = wait(emb_gathered)  # f32[4, 4]
head_gathered = all_gather(head, 2, group0)  # f32[4, 4]
head_whole = wait(head_gathered)  # f32[4, 4]
scores = aten.mm(emb_whole, head_whole)  # f32[4, 4]
loss = aten.sum(scores)  # f32[]
return loss  # loss
"""
    )
    assert_expected_inline(
        golden(DeduplicateShared(), graph),
        """\
emb = parameter('emb.weight')  # f32[2, 4]
emb_gathered = all_gather(emb, 2, group0)  # f32[4, 4]
emb_whole = wait(emb_gathered)  # f32[4, 4]
scores = aten.mm(emb_whole, emb_whole)  # f32[4, 4]
loss = aten.sum(scores)  # f32[]
return loss  # loss
""",
    )


def test_coalesce_grad_reductions() -> None:
    graph = read(
        """\
weight = parameter('weight')  # f32[2, 4]
x = batch('x')  # bf16[4, 4]
# backward
first = aten.mm(x, x)  # bf16[4, 4]
first_cast = aten._to_copy(first, dtype=f32)  # f32[4, 4]
first_scatter = reduce_scatter(first_cast, 'avg', 2, group0)  # f32[2, 4]
first_grad = wait(first_scatter)  # f32[2, 4]
second = aten.mm(first, x)  # bf16[4, 4]
second_cast = aten._to_copy(second, dtype=f32)  # f32[4, 4]
second_scatter = reduce_scatter(second_cast, 'avg', 2, group0)  # f32[2, 4]
second_grad = wait(second_scatter)  # f32[2, 4]
grad = aten.add(first_grad, second_grad)  # f32[2, 4]
return grad  # gradient of weight
"""
    )
    assert_expected_inline(
        golden(CoalesceGradReductions(), graph),
        """\
weight = parameter('weight')  # f32[2, 4]
x = batch('x')  # bf16[4, 4]
# backward
first = aten.mm(x, x)  # bf16[4, 4]
second = aten.mm(first, x)  # bf16[4, 4]
add = aten.add(first, second)  # bf16[4, 4]
second_cast = aten._to_copy(add, dtype=f32)  # f32[4, 4]
second_scatter = reduce_scatter(second_cast, 'avg', 2, group0)  # f32[2, 4]
second_grad = wait(second_scatter)  # f32[2, 4]
return second_grad  # gradient of weight
""",
    )


def test_bucket_fsdp_collectives() -> None:
    graph = read(
        """\
weight = parameter('layer.weight')  # f32[2, 4]
bias = parameter('layer.bias')  # f32[2]
weight_gathered = all_gather(weight, 2, group0)  # f32[4, 4]
weight_whole = wait(weight_gathered)  # f32[4, 4]
bias_gathered = all_gather(bias, 2, group0)  # f32[4]
bias_whole = wait(bias_gathered)  # f32[4]
return weight_whole, bias_whole  # whole weight, whole bias
"""
    )
    assert_expected_inline(
        golden(BucketFSDPCollectives(LAYER), graph),
        """\
weight = parameter('layer.weight')  # f32[2, 4]
bias = parameter('layer.bias')  # f32[2]
reshape = aten.reshape(weight, [-1])  # f32[8]
reshape_1 = aten.reshape(bias, [-1])  # f32[2]
cat = aten.cat([reshape, reshape_1])  # f32[10]
gathered = all_gather(cat, 2, group0)  # f32[20]
waited = wait(gathered)  # f32[20]
view = aten.view(waited, [2, -1])  # f32[2, 10]
split_with_sizes_copy = aten.split_with_sizes_copy(view, [8, 2], 1)
getitem = split_with_sizes_copy[0]  # f32[2, 8]
view_1 = aten.view(getitem, [4, 4])  # f32[4, 4]
getitem_1 = split_with_sizes_copy[1]  # f32[2, 2]
view_2 = aten.view(getitem_1, [4])  # f32[4]
return view_1, view_2  # whole weight, whole bias
""",
    )


def test_bucket_fsdp_collectives_reductions() -> None:
    graph = read(
        """\
weight = parameter('layer.weight')  # f32[2, 4]
bias = parameter('layer.bias')  # f32[2]
of_weight = batch('of weight')  # f32[4, 4]
of_bias = batch('of bias')  # f32[4]
# backward
bias_scattered = reduce_scatter(of_bias, 'avg', 2, group0)  # f32[2]
bias_grad = wait(bias_scattered)  # f32[2]
weight_scattered = reduce_scatter(of_weight, 'avg', 2, group0)  # f32[2, 4]
weight_grad = wait(weight_scattered)  # f32[2, 4]
return bias_grad, weight_grad  # gradient of layer.bias, gradient of layer.weight
"""
    )
    assert_expected_inline(
        golden(BucketFSDPCollectives(LAYER), graph, example=1),
        """\
weight = parameter('layer.weight')  # f32[2, 4]
bias = parameter('layer.bias')  # f32[2]
of_weight = batch('of weight')  # f32[4, 4]
of_bias = batch('of bias')  # f32[4]
# backward
chunk_cat = aten._chunk_cat([of_weight, of_bias], 0, 2)  # f32[2, 10]
scattered = reduce_scatter(chunk_cat, 'avg', 2, group0)  # f32[1, 10]
waited = wait(scattered)  # f32[1, 10]
view = aten.view(waited, [-1])  # f32[10]
split_with_sizes = aten.split_with_sizes(view, [8, 2])
getitem = split_with_sizes[0]  # f32[8]
view_1 = aten.view(getitem, [2, 4])  # f32[2, 4]
getitem_1 = split_with_sizes[1]  # f32[2]
view_2 = aten.view(getitem_1, [2])  # f32[2]
return view_2, view_1  # gradient of layer.bias, gradient of layer.weight
""",
    )


def test_canonical_reductions() -> None:
    graph = read(
        """\
weight = parameter('layer.weight')  # f32[2, 4]
of_weight = batch('of weight')  # f32[4, 4]
# backward
scattered = reduce_scatter(of_weight, 'avg', 2, group0)  # f32[2, 4]
waited = wait(scattered)  # f32[2, 4]
return waited  # gradient of layer.weight
"""
    )
    assert_expected_inline(
        golden(CanonicalReductions(), graph),
        """\
weight = parameter('layer.weight')  # f32[2, 4]
of_weight = batch('of weight')  # f32[4, 4]
# backward
reduce_scatter_in_tree = graphpasses.reduce_scatter_in_tree(of_weight, 'tree', 2, '0')  # f32[2, 4]
waited = wait(reduce_scatter_in_tree)  # f32[2, 4]
div = aten.div.Scalar(waited, 2.0)  # f32[2, 4]
return div  # gradient of layer.weight
""",
    )


def test_reshard_after_forward() -> None:
    graph = read(
        """\
weight = parameter('layer.weight')  # f32[2, 4]
x = batch('x')  # f32[3, 4]
gathered = all_gather(weight, 2, group0)  # f32[4, 4]
whole = wait(gathered)  # f32[4, 4]
y = aten.mm(x, whole)  # f32[3, 4]
loss = aten.sum(y)  # f32[]
# backward
grad = aten.mm(y, whole)  # f32[3, 4]
return loss, grad  # loss, x_grad
"""
    )
    assert_expected_inline(
        golden(ReshardAfterForward(LAYER), graph),
        """\
weight = parameter('layer.weight')  # f32[2, 4]
x = batch('x')  # f32[3, 4]
gathered = all_gather(weight, 2, group0)  # f32[4, 4]
whole = wait(gathered)  # f32[4, 4]
y = aten.mm(x, whole)  # f32[3, 4]
loss = aten.sum(y)  # f32[]
# backward
gathered_1 = all_gather(weight, 2, group0)  # f32[4, 4]
waited = wait(gathered_1)  # f32[4, 4]
grad = aten.mm(y, waited)  # f32[3, 4]
return loss, grad  # loss, x_grad
""",
    )


def test_prefetch_collectives() -> None:
    graph = read(
        """\
first = parameter('first')  # f32[2, 4]
second = parameter('second')  # f32[2, 4]
x = batch('x')  # f32[4, 4]
gather_first = all_gather(first, 2, group0)  # f32[4, 4]
first_whole = wait(gather_first)  # f32[4, 4]
y = aten.mm(x, first_whole)  # f32[4, 4]
gather_second = all_gather(second, 2, group0)  # f32[4, 4]
second_whole = wait(gather_second)  # f32[4, 4]
z = aten.mm(y, second_whole)  # f32[4, 4]
# backward
second_grads = aten.mm(y, z)  # f32[4, 4]
scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
second_grad = wait(scatter_second)  # f32[2, 4]
first_grads = aten.mm(x, second_whole)  # f32[4, 4]
scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
first_grad = wait(scatter_first)  # f32[2, 4]
return second_grad, first_grad  # gradient of second, gradient of first
"""
    )
    assert_expected_inline(
        golden(PrefetchCollectives(), graph),
        """\
first = parameter('first')  # f32[2, 4]
second = parameter('second')  # f32[2, 4]
x = batch('x')  # f32[4, 4]
gather_first = all_gather(first, 2, group0)  # f32[4, 4]
gather_second = all_gather(second, 2, group0)  # f32[4, 4]
first_whole = wait(gather_first)  # f32[4, 4]
y = aten.mm(x, first_whole)  # f32[4, 4]
second_whole = wait(gather_second)  # f32[4, 4]
z = aten.mm(y, second_whole)  # f32[4, 4]
# backward
second_grads = aten.mm(y, z)  # f32[4, 4]
scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
first_grads = aten.mm(x, second_whole)  # f32[4, 4]
second_grad = wait(scatter_second)  # f32[2, 4]
scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
first_grad = wait(scatter_first)  # f32[2, 4]
return second_grad, first_grad  # gradient of second, gradient of first
""",
    )


def test_schedule_collectives() -> None:
    graph = read(
        """\
first = parameter('first')  # f32[2, 4]
second = parameter('second')  # f32[2, 4]
x = batch('x')  # f32[4, 4]
gather_first = all_gather(first, 2, group0)  # f32[4, 4]
first_whole = wait(gather_first)  # f32[4, 4]
y = aten.mm(x, first_whole)  # f32[4, 4]
gather_second = all_gather(second, 2, group0)  # f32[4, 4]
second_whole = wait(gather_second)  # f32[4, 4]
z = aten.mm(y, second_whole)  # f32[4, 4]
# backward
second_grads = aten.mm(y, z)  # f32[4, 4]
scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
second_grad = wait(scatter_second)  # f32[2, 4]
gather_again = all_gather(first, 2, group0)  # f32[4, 4]
again_whole = wait(gather_again)  # f32[4, 4]
of_y = aten.mm(z, again_whole)  # f32[4, 4]
first_grads = aten.mm(x, of_y)  # f32[4, 4]
scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
first_grad = wait(scatter_first)  # f32[2, 4]
return second_grad, first_grad  # gradient of second, gradient of first
"""
    )
    wire = Wire(Speeds(flops=1e-5), "ring")  # an all-gather takes 12 µs, a product 13
    assert_expected_inline(
        golden(ScheduleCollectives(wire, budget=1024), graph),
        """\
first = parameter('first')  # f32[2, 4]
second = parameter('second')  # f32[2, 4]
x = batch('x')  # f32[4, 4]
gather_first = all_gather(first, 2, group0)  # f32[4, 4]
gather_second = all_gather(second, 2, group0)  # f32[4, 4]
first_whole = wait(gather_first)  # f32[4, 4]
y = aten.mm(x, first_whole)  # f32[4, 4]
# backward
gather_again = all_gather(first, 2, group0)  # f32[4, 4]
# forward
second_whole = wait(gather_second)  # f32[4, 4]
z = aten.mm(y, second_whole)  # f32[4, 4]
# backward
second_grads = aten.mm(y, z)  # f32[4, 4]
scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
again_whole = wait(gather_again)  # f32[4, 4]
of_y = aten.mm(z, again_whole)  # f32[4, 4]
first_grads = aten.mm(x, of_y)  # f32[4, 4]
second_grad = wait(scatter_second)  # f32[2, 4]
scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
first_grad = wait(scatter_first)  # f32[2, 4]
return second_grad, first_grad  # gradient of second, gradient of first
""",
    )


def test_update_in_backward() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    graph = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(3, 2), optimizer=optimizer)
    assert_expected_inline(
        golden(UpdateInBackward(), graph),
        """\
weight = parameter('weight')  # f32[2, 2]
batch_0 = batch('batch[0]')  # f32[3, 2]
lr_of_group_0 = hyperparameter('group 0', 'lr')  # zuf0
t = aten.t(weight)  # f32[2, 2]
mm = aten.mm(batch_0, t)  # f32[3, 2]
sum = aten.sum(mm)  # f32[]
ones_like = aten.ones_like(sum, pin_memory=False, memory_format=torch.preserve_format)  # f32[]
# backward
expand = aten.expand(ones_like, [3, 2])  # f32[3, 2]
t_1 = aten.t(expand)  # f32[2, 3]
mm_1 = aten.mm(t_1, batch_0)  # f32[2, 2]
t_2 = aten.t(mm_1)  # f32[2, 2]
t_3 = aten.t(t_2)  # f32[2, 2]
neg = operator.neg(lr_of_group_0)  # -zuf0
foreach_add = aten._foreach_add_.List([weight], [t_3], alpha=neg)
return sum, t_3  # loss, gradient of weight
""",
    )
