"""Optimizers' operators on lists, fused: eager's bits, also where it multiplies and adds in one, or does not."""

from __future__ import annotations

import operator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from graphpasses.analysis.dependencies import dependencies
from graphpasses.analysis.effects import operator_effects
from graphpasses.fusion.list_updates import UPDATES, Updates, plan_updates

aten = torch.ops.aten
SIZES = ((5, 421), (2049,))


class Graph:
    """A graph of updates of two parameters of odd sizes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def tensors(self, name: str) -> list[fx.Node]:
        return [self.placeholder(f"{name}_{index}", torch.empty(size)) for index, size in enumerate(SIZES)]

    def placeholder(self, name: str, value: object) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = None
        return node

    def roots(self, tensors: list[fx.Node]) -> list[fx.Node]:
        root = self.call(aten._foreach_sqrt.default, tensors)
        root.meta["val"] = [torch.empty(size) for size in SIZES]
        parts = [self.call(operator.getitem, root, index) for index in range(len(SIZES))]
        for part, value in zip(parts, root.meta["val"], strict=True):
            part.meta["val"] = value
        return parts

    def adam(self) -> list[fx.Node]:
        """Updates as AdamW does; returns its roots."""
        p, m, v, g = map(self.tensors, "pmvg")
        self.call(aten._foreach_mul_.Scalar, p, 0.9)
        self.call(aten._foreach_lerp_.Scalar, m, g, 0.1)
        self.call(aten._foreach_addcmul_.Scalar, v, g, g, 0.001)
        roots = self.roots(v)
        self.call(aten._foreach_add_.Scalar, roots, 1e-8)
        self.call(aten._foreach_addcdiv_.Scalar, p, m, roots, -0.01)
        return roots

    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def runs(self) -> list[list[str]]:
        self.graph.output(())
        needed = dependencies(self.graph, operator_effects)
        return [[node.name for node in run] for run in plan_updates(self.graph, needed)]


@pytest.mark.slow
def test_updates_have_eagers_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    p, m, v, g, d = map(graph.tensors, "pmvgd")
    a, b = (graph.placeholder(name, 0.5) for name in "ab")
    calls = [
        graph.call(aten._foreach_mul_.Scalar, p, a),
        graph.call(aten._foreach_lerp_.Scalar, m, g, b),
        graph.call(aten._foreach_mul_.ScalarList, v, [a, 0.1]),
        graph.call(aten._foreach_addcmul_.Scalar, v, g, g, 0.001),
        graph.call(aten._foreach_addcmul_.ScalarList, v, g, m, [b, b]),
        graph.call(aten._foreach_div_.ScalarList, d, [a, b]),
        graph.call(aten._foreach_div_.Scalar, d, 0.3),
        graph.call(aten._foreach_add_.Scalar, d, 1e-8),
        graph.call(aten._foreach_add_.ScalarList, d, [0.1, 0.2]),
        graph.call(aten._foreach_addcdiv_.ScalarList, p, m, d, [a, b]),
        graph.call(aten._foreach_addcdiv_.Scalar, p, g, v, -0.01),
    ]
    updates = Updates.of(calls)
    assert {node.target for node in calls} == UPDATES.keys()
    kernels = {column.key(): column.compile() for column in updates.columns}
    assert len(kernels) == 2
    assert updates.find_difference(kernels) == ""
    monkeypatch.setitem(UPDATES, aten._foreach_lerp_.Scalar, lambda x, end, weight: x + weight * (end - x))
    rounded_twice = {column.key(): column.compile() for column in updates.columns}
    assert "other elements of" in updates.find_difference(rounded_twice)


@pytest.mark.slow
def test_a_root_is_eagers_inside_a_kernel() -> None:
    graph = Graph()
    graph.adam()
    updates = Updates.of(graph.calls())
    assert [node.name for node in updates.outputs] == ["p_0", "m_0", "v_0", "p_1", "m_1", "v_1"]
    kernels = {column.key(): column.compile() for column in updates.columns}
    assert len(kernels) == 2
    assert updates.find_difference(kernels) == ""
    with mock.patch.object(torch, "sqrt", lambda x: x.double().sqrt().float()):  # rounded, which MKL's is not
        assert "other elements of" in updates.find_difference(kernels)
    assert graph.runs() == [[node.name for node in graph.calls()]]


def test_a_root_that_others_read_cuts_a_run() -> None:
    graph = Graph()
    roots = graph.adam()
    graph.call(aten.neg.default, roots[0]).meta["val"] = torch.empty(SIZES[0])
    assert graph.runs() == [
        ["_foreach_mul__scalar", "_foreach_lerp__scalar", "_foreach_addcmul__scalar"],
        ["_foreach_add__scalar", "_foreach_addcdiv__scalar"],
    ]


@pytest.mark.slow
def test_what_a_root_read_is_written_again() -> None:
    graph = Graph()
    p, v = map(graph.tensors, "pv")
    graph.call(aten._foreach_addcmul_.Scalar, p, v, v, 0.1)
    graph.call(aten._foreach_mul_.Scalar, v, 0.1)
    graph.call(aten._foreach_addcdiv_.Scalar, p, v, graph.roots(v), -0.01)
    graph.call(aten._foreach_mul_.Scalar, v, 0.3)
    updates = Updates.of(graph.calls())
    assert updates.find_difference({column.key(): column.compile() for column in updates.columns}) == ""


def test_a_run_ends_where_it_is_read() -> None:
    graph = Graph()
    p, g = map(graph.tensors, "pg")
    graph.call(aten._foreach_mul_.Scalar, p, 0.5)
    graph.call(aten._foreach_add_.Scalar, p, 0.5)
    graph.call(aten.neg.default, p[0]).meta["val"] = torch.empty(SIZES[0])
    graph.call(aten._foreach_mul_.Scalar, p, 0.5)
    graph.call(aten._foreach_add_.Scalar, g, 0.5)
    assert graph.runs() == [
        ["_foreach_mul__scalar", "_foreach_add__scalar"],
        ["_foreach_mul__scalar_1", "_foreach_add__scalar_1"],
    ]


def test_tensors_that_overlap_are_left_alone() -> None:
    graph = Graph()
    memory = torch.empty(4096)
    p = [graph.placeholder("p", memory)]
    g = [graph.placeholder("g", memory[:])]
    graph.call(aten._foreach_mul_.Scalar, p, 0.5)
    graph.call(aten._foreach_lerp_.Scalar, p, g, 0.5)
    graph.call(aten._foreach_add_.Scalar, p, 0.5)
    assert graph.runs() == []


def test_roots_of_what_is_written_elsewhere_are_left_alone() -> None:
    graph = Graph()
    p, m = map(graph.tensors, "pm")
    same = [graph.placeholder(f"same_{index}", each.meta["val"][:]) for index, each in enumerate(p)]
    graph.call(aten._foreach_mul_.Scalar, p, 0.5)
    graph.call(aten._foreach_addcdiv_.Scalar, p, m, graph.roots(same), 0.5)
    assert graph.runs() == []
