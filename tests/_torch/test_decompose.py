"""Operators become what Inductor lowers, whatever they are made from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.decompose import decompose

aten = torch.ops.aten


def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = aten.split.Tensor(x, 2)
    return aten.addmm(second, first, first), aten.zeros([2, 2]), aten.silu(x)


def test_what_has_tensors_and_what_has_none() -> None:
    x = torch.randn(4, 2)
    module = make_fx(function, tracing_mode="fake")(x)
    traced = {node.target for node in module.graph.nodes}
    table = select_decomp_table()
    assert {aten.zeros.default, aten.silu.default} <= traced & table.keys()
    decompose(module)
    decomposed = {node.target for node in module.graph.nodes}
    assert {aten.zeros.default, aten.silu.default}.isdisjoint(decomposed)
    for actual, expected in zip(module(x), function(x), strict=True):
        torch.testing.assert_close(actual, expected)
    for node in module.graph.nodes:
        assert node.op in ("placeholder", "output") or "val" in node.meta


def test_a_graph_of_numbers_alone() -> None:
    module = make_fx(lambda: aten.zeros([3]), tracing_mode="fake")()
    decompose(module)
    assert aten.zeros.default not in {node.target for node in module.graph.nodes}
    assert torch.equal(module(), torch.zeros(3))


def test_again_changes_nothing() -> None:
    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 2))
    decompose(module)
    code = module.code
    decompose(module)
    assert module.code == code
