"""What is said of each row of a tensor is what operators do, for any number of rows; nothing is said of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from graphpasses._torch import pytree
from graphpasses.capture import capture_train_step
from graphpasses.graph import WAIT
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.proof.core.values import Value
from graphpasses.proof.movement import IDENTITIES
from graphpasses.proof.rows import ROW_BY_ROW, RowValues, by_row
from tests.proof.code import Code, Model, X, answer
from tests.proof.materialized import materialized

aten = torch.ops.aten
A, B, C, COLUMN, NUM_ROWS = "a", "b", "c", "column", "number of rows"
SHAPES = {A: (6,), B: (6,), C: (2, 3), COLUMN: (1,)}  # of rows

ALIKE: list[tuple[Any, ...]] = [
    *((target, C, [-1, 6]) for target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default)),
    (aten.view_copy.default, A, [-1, 3, 2]),
    (aten.view.default, C, [-1]),
    (aten.view.default, A, [-1, 2]),
    *(
        (target, COLUMN, *dim)
        for target, *dim in ((aten.squeeze.default,), (aten.squeeze.dim, 1), (aten.squeeze.dims, [1]))
    ),
    (aten.unsqueeze.default, A, 1),
    (aten.transpose.int, C, 1, 2),
    (aten.permute.default, C, [0, 2, 1]),
    (aten.expand.default, COLUMN, [-1, 4]),
    (aten.slice.Tensor, A, 1, 2, 5),
    (aten.select.int, C, 2, 1),
    (aten.split.Tensor, A, 4, 1),
    (aten.split_with_sizes.default, A, [1, 5], 1),
    (aten.chunk.default, A, 2, -1),
    (aten.unbind.int, C, 1),
    (aten.cat.default, [A, B, COLUMN], 1),
    (aten.stack.default, [A, B], 1),
    (aten.stack.default, [A, B], -1),
    *((target, A) for target in (aten.zeros_like.default, aten.ones_like.default, aten.neg.default)),
    (aten.full_like.default, A, 0.5),
    (aten.fill.Scalar, A, 0.5),
    (aten.zero.default, A),
    *((target, A) for target in IDENTITIES if target != WAIT),
    (aten.copy.default, A, B),
    *((target, A, 3.0) for target in (aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor)),
    *((target, A, B) for target in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)),
    (JOIN_FEATURES, [A, B], NUM_ROWS),
    (SPLIT_FEATURES, A, [2, 4], [NUM_ROWS, NUM_ROWS]),
]
OTHERS: list[tuple[Any, ...]] = [
    (aten.view.default, A, [2, -1]),
    (aten.unsqueeze.default, A, 0),
    (aten.t.default, A),
    (aten._chunk_cat.default, [A, B], 0, 1),
    (aten.transpose.int, C, 0, 1),
    (aten.permute.default, C, [1, 0, 2]),
    (aten.slice.Tensor, A, 0, 1, 3),
    (aten.slice.Tensor, A, 1, 0, 6, 2),  # no map of elements has it
    (aten.select.int, A, 0, 1),
    (aten.split.Tensor, A, 2, 0),
    (aten.cat.default, [A, B], 0),
    (aten.stack.default, [A, B], 0),
    (aten.add.Tensor, A, COLUMN),
    (aten.mul.Tensor, A, "a vector"),
    (aten.tanh.default, A),
    (JOIN_FEATURES, [A, B], 7),
    (SPLIT_FEATURES, A, [2, 4], [NUM_ROWS, 1]),
]


def said(target: Any, args: Any) -> tuple[RowValues, Any]:
    """Returns what is said of an operator, on tensors of which no one knows how many rows they have."""
    mode, values = FakeTensorMode(shape_env=ShapeEnv()), RowValues()
    rows = mode.from_tensor(
        torch.ones(5, 1),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
    )
    with mode:
        fakes = {name: torch.empty(rows.shape[0], *shape) for name, shape in SHAPES.items()}
        fakes |= {"a vector": torch.empty(6), NUM_ROWS: rows.shape[0]}
        result = target(*_given(args, fakes))
    size = str(rows.shape[0])
    known = {name: values.of_rows(("input", name), torch.float32, size, shape) for name, shape in SHAPES.items()}
    known[NUM_ROWS] = values.other((NUM_ROWS,))
    known["a vector"] = values.tensor(torch.float32, (6,), values.source(("input", "a vector"), 6))
    if target not in ROW_BY_ROW:
        return values, None
    return values, by_row(values, target, "call", result, _given(args, known), {})


def _given(args: Any, values: dict[str, Any]) -> Any:
    return pytree.tree_map(lambda each: values[each] if isinstance(each, str) else each, [*args])


@pytest.mark.parametrize("case", ALIKE, ids=str)
def test_each_row_is_what_the_operator_makes(case: Any) -> None:
    target, *args = case
    values, found = said(target, args)
    found = found if isinstance(found, list) else [found]
    for num_rows in (2, 3, 7):
        inputs = {name: torch.randn(num_rows, *shape) for name, shape in SHAPES.items()}
        made = target(*_given(args, {**inputs, NUM_ROWS: num_rows}))
        for value, result in zip(found, [*made] if isinstance(made, (list, tuple)) else [made], strict=True):
            for index in range(num_rows):
                of_row = {name: x[index].clone() for name, x in inputs.items()}
                expected = materialized(values, row_of(values, value), of_row)  # one row, or several
                assert torch.equal(expected, result[index * len(expected) :][: len(expected)])


def row_of(values: RowValues, value: Any) -> Value:
    assert isinstance(value, Value)
    assert value.rows is not None
    return values[value.rows[1]]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_what_does_not_treat_rows_alike(case: Any) -> None:
    target, *args = case
    assert said(target, args)[1] is None


def test_what_is_split_and_joined_is_the_same_value() -> None:
    values = RowValues()
    x = values.of_rows(("input", A), torch.float32, "s0", (6,))
    other = values.of_rows(("input", A), torch.float32, "s1", (6,))
    assert x.rows is not None
    assert values.in_rows("s0", values[x.rows[1]], "a view") is x
    assert values.in_rows("s1", values[x.rows[1]], "another") is not x
    assert other is x  # of one key there is one tensor, whatever its rows are called


def test_every_operator_has_a_case() -> None:
    without_tensors = {
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.scalar_tensor.default,
        WAIT,
    }
    like = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten._to_copy.default}
    # Rows become columns; parts along dim 0; torch has no fake kernel of the last for symbolic sizes.
    refused = {aten.t.default, aten._chunk_cat.default, aten.split_with_sizes_copy.default}
    assert {target for target, *_ in ALIKE} == ROW_BY_ROW.keys() - without_tensors - like - refused


def halves(code: Code, *order: int) -> fx.Node:
    x = code.tanh_default(code.x)
    parts = code.split_with_sizes_default(x, [3, 5], 1)
    return code.sum_default(code.sin_default(code.cat_default([code.item(parts, index) for index in order], 1)))


def joined(code: Code) -> fx.Node:
    return code.sum_default(code.sin_default(code.tanh_default(code.x)))


def test_a_step_for_any_batch_size() -> None:
    captured = capture_train_step(
        lambda model, x: model(x), Model(), X, check=False, dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    assert answer(captured, lambda code: halves(code, 0, 1), joined) == "proved"
    assert answer(captured, lambda code: halves(code, 1, 0), joined) != "proved"
