"""Lookups read from a graph: what FBGEMM's modules pass is what is read and written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpasses.embedding.emit_lookup import arguments_like
from graphpasses.fbgemm.lookups import LookupCall, TableLayout
from graphpasses.graph import TrainGraph
from tests.helpers.tables import Lookups, model_graph, tables


@pytest.fixture(scope="module")
def graph() -> TrainGraph:
    """Returns a graph with one lookup by row-wise Adagrad: two features of one table, one of another."""
    return model_graph(Lookups([tables((8, 12), "rowwise_adagrad", features=(0, 0, 1))]))


@pytest.fixture
def call(graph: TrainGraph) -> LookupCall:
    (call,) = LookupCall.all(graph)
    return call


def test_what_is_read(call: LookupCall) -> None:
    assert (call.optimizer, call.module, call.num_features) == ("rowwise_adagrad", "tables.0", 3)
    assert call.is_pooled
    assert call.reject_reason() is None
    assert call.layout() == TableLayout(
        dims=(8, 8, 12),
        first_rows=(0, 0, 20),
        num_rows=41,
        weights_offsets=(0, 0, 160),
        momentum1_offsets=(0, 0, 20),
    )


def test_what_is_written_is_what_fbgemm_passes(graph: TrainGraph, call: LookupCall) -> None:
    graph = graph.copy()
    (call,) = LookupCall.all(graph)
    module = graph.model.get_submodule("tables.0")
    layout = call.layout()
    added = arguments_like(call, layout, call.states, lambda value, key: graph.add_input(value, f"new.{key}"))
    assert added["D_offsets"] is not call.arguments["D_offsets"]
    for name, value in added.items():
        expected = call.arguments[name]
        for new, old in zip(_flat(value), _flat(expected), strict=True):
            assert _same(graph, call, new, old), name
    assert layout.info_b() == (module.info_B_num_bits, module.info_B_mask)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _same(graph: TrainGraph, call: LookupCall, new: Any, old: Any) -> bool:
    if new is old or not isinstance(new, fx.Node):
        return bool(new is old or new == old)
    value: Tensor = graph.live[graph.placeholders.index(new)]
    given = call.inputs[old]
    return value.dtype == given.dtype and torch.equal(value, given)


def test_joined_features_have_rows_of_their_own() -> None:
    one = TableLayout(dims=(4,), first_rows=(0,), num_rows=10, weights_offsets=(0,), momentum1_offsets=(0,))
    two = dataclasses.replace(one, dims=(8,), num_rows=7)
    assert TableLayout.join([one, two, one], [0, 64, 128], [0, 16, 32]) == TableLayout(
        dims=(4, 8, 4),
        first_rows=(0, 10, 17),
        num_rows=27,
        weights_offsets=(0, 64, 128),
        momentum1_offsets=(0, 16, 32),
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"max_B": 3}, "its features have batch sizes of their own"),
        ({"feature_requires_grad": 1}, "it uses FBGEMM's feature_requires_grad, a cache, or statistics"),
        ({"aux_tensor": [1] * 7}, "it uses FBGEMM's feature_requires_grad, a cache, or statistics"),
        ({"aux_bool": [True] * 7}, "its optimizer decays all rows, looked up or not"),
    ],
)
def test_what_a_layout_cannot_describe(call: LookupCall, changed: dict[str, Any], reason: str) -> None:
    assert dataclasses.replace(call, arguments={**call.arguments, **changed}).reject_reason() == reason


def test_hyperparameters_that_are_inputs(call: LookupCall) -> None:
    changed = {"optim_float": [*call.arguments["optim_float"][:-1], call.node]}
    reason = dataclasses.replace(call, arguments={**call.arguments, **changed}).reject_reason()
    assert reason == "its hyperparameters are inputs of the graph, as torch.compile(dynamic=True) makes them"


def test_tables_that_are_no_inputs(call: LookupCall) -> None:
    assert dataclasses.replace(call, inputs={}).reject_reason() == "its tables are not inputs of the graph"


def test_an_empty_last_table(call: LookupCall) -> None:
    rows = call.arguments["hash_size_cumsum"]
    changed = dataclasses.replace(call, inputs={**call.inputs, rows: torch.tensor([0, 0, 20, 20])})
    assert changed.reject_reason() == "its last table has no rows"


def test_other_calls_are_no_lookups(graph: TrainGraph) -> None:
    assert LookupCall.all(model_graph(nn.Linear(3, 2), torch.ones(1, 3))) == []
