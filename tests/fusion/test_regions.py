"""Which calls become one kernel: none between which something else must run, and no memory that others write."""

from __future__ import annotations

import pytest

from graphpasses.fusion.regions import plan_regions
from tests.helpers.golden import read


def regions(text: str) -> list[list[str]]:
    return [[node.name for node in region] for region in plan_regions(read(text).graph).regions]


def test_views_join_calls() -> None:
    graph = """\
x = batch('x')  # f32[64, 64]
one = aten.mul(x, 2)  # f32[64, 64]
across = aten.t(one)  # f32[64, 64]
two = aten.add(across, x)  # f32[64, 64]
loss = aten.sum(two)  # f32[]
return loss  # loss
"""
    assert regions(graph) == [["one", "across", "two"]]


def test_what_a_product_lies_between_is_apart() -> None:
    graph = """\
x = batch('x')  # f32[64, 64]
one = aten.mul(x, 2)  # f32[64, 64]
two = aten.neg(one)  # f32[64, 64]
y = aten.mm(two, x)  # f32[64, 64]
three = aten.mul(y, one)  # f32[64, 64]
four = aten.add(three, two)  # f32[64, 64]
loss = aten.sum(four)  # f32[]
return loss  # loss
"""
    assert regions(graph) == [["one", "two"], ["three", "four"]]


def test_what_a_write_lies_between_is_apart() -> None:
    graph = """\
x = batch('x')  # f32[64, 64]
one = aten.mul(x, 2)  # f32[64, 64]
written = aten.copy_(x, one)  # f32[64, 64]
two = aten.neg(x)  # f32[64, 64]
three = aten.add(two, one)  # f32[64, 64]
loss = aten.sum(three)  # f32[]
return loss  # loss
"""
    assert regions(graph) == [["two", "three"]]


@pytest.mark.parametrize(
    "call",
    [
        "aten.add(x, x, alpha=2)",  # eager multiplies and adds in one
        "aten.sqrt(x)",  # MKL's
        "aten.exp(x)",
        "aten.cumsum(x, 0)",
    ],
)
def test_what_is_not_exact_stays(call: str) -> None:
    graph = f"""\
x = batch('x')  # f32[64, 64]
one = {call}  # f32[64, 64]
two = aten.neg(one)  # f32[64, 64]
loss = aten.sum(two)  # f32[]
return loss  # loss
"""
    assert regions(graph) == []


def test_small_tensors_stay() -> None:
    graph = """\
x = batch('x')  # f32[4, 4]
one = aten.mul(x, 2)  # f32[4, 4]
two = aten.neg(one)  # f32[4, 4]
loss = aten.sum(two)  # f32[]
return loss  # loss
"""
    assert regions(graph) == []


def test_a_cast_joins_what_reads_it() -> None:
    graph = """\
x = batch('x')  # bf16[64, 64]
wide = aten._to_copy(x, dtype=f32)  # f32[64, 64]
y = aten.mean(x)  # bf16[]
more = aten.add(y, 1)  # bf16[]
two = aten.expand(more, [64, 64])  # bf16[64, 64]
three = aten.clone(two)  # bf16[64, 64]
four = aten.mul(wide, three)  # f32[64, 64]
loss = aten.sum(four)  # f32[]
return loss  # loss
"""
    assert regions(graph) == [["wide", "more", "two", "three", "four"]]


def test_backward_is_apart() -> None:
    graph = """\
x = batch('x')  # f32[64, 64]
one = aten.mul(x, 2)  # f32[64, 64]
loss = aten.sum(one)  # f32[]
# backward
two = aten.neg(one)  # f32[64, 64]
three = aten.mul(two, x)  # f32[64, 64]
return loss, three  # loss, gradient of x
"""
    assert regions(graph) == [["two", "three"]]
