"""The passes that choose kernels on a graph of some ten lines."""

from __future__ import annotations

from expecttest import assert_expected_inline

from graphpasses.graph.nodes import EXACT_REGION
from graphpasses.passes import FuseExactly
from tests.helpers.golden import golden, read

CALLS = """\
weight = parameter('weight')  # bf16[64, 64]
x = batch('x')  # bf16[64, 64]
half = aten.mul(x, 0.5)  # bf16[64, 64]
y = aten.mm(x, weight)  # bf16[64, 64]
more = aten.add(half, x)  # bf16[64, 64]
z = aten.add(y, more)  # bf16[64, 64]
z_1 = aten.add_(z, more)  # bf16[64, 64]
loss = aten.sum(z_1)  # bf16[]
return loss  # loss
"""


def test_fuse_exactly() -> None:
    graph = read(CALLS)
    assert_expected_inline(
        golden(FuseExactly(), graph),
        """\
weight = parameter('weight')  # bf16[64, 64]
x = batch('x')  # bf16[64, 64]
y = aten.mm(x, weight)  # bf16[64, 64]
half = aten.mul(x, 0.5)  # bf16[64, 64]
more = aten.add(half, x)  # bf16[64, 64]
z = aten.add(y, more)  # bf16[64, 64]
add = aten.add(z, more)  # bf16[64, 64]
loss = aten.sum(add)  # bf16[]
return loss  # loss
""",
    )


def test_a_second_run_changes_nothing() -> None:
    graph = read(CALLS)
    FuseExactly().rewrite(graph)
    once = [(str(node), node.meta.get(EXACT_REGION)) for node in graph.graph.nodes]
    assert FuseExactly().rewrite(graph) == 1
    assert [(str(node), node.meta.get(EXACT_REGION)) for node in graph.graph.nodes] == once
    assert {region for _, region in once} == {None, 0}
