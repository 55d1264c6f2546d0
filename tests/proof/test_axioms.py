"""Every axiom, on random data: what a rule says of an operator is what the operator computes, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphpasses.proof.prove  # noqa: F401  its modules register their axioms
from graphpasses.graph import WAIT
from graphpasses.identity import same_bits
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.ops.pack_all_to_all import pack_all_to_all, unpack_all_to_all
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.proof import elements
from graphpasses.proof.core.operators import AXIOMS, RULES
from graphpasses.proof.core.values import Value, Values
from graphpasses.proof.movement import gathered
from tests.proof.materialized import materialized
from tests.proof.numbers import FLOATS, random_bits, same_but_nans

aten = torch.ops.aten
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
INTEGERS = (torch.int64, torch.int32, torch.uint8)
ALL = (*FLOATS, *INTEGERS, torch.bool)
X, Y, Z = "x", "y", "z"  # of shapes (4, 6), (4, 6) and (2, 6)

# Operator, arguments, and the dtypes that the axiom is claimed for.
CASES = {
    aten.view.default: [(X, [3, 8])],
    aten.reshape.default: [(X, [-1])],
    aten._unsafe_view.default: [(X, [2, 12])],
    aten.view_copy.default: [(X, [2, 12])],
    aten.detach.default: [(X,)],
    aten.alias.default: [(X,)],
    aten.clone.default: [(X,)],
    aten.contiguous.default: [(X,)],
    aten.lift_fresh.default: [(X,)],
    aten.lift_fresh_copy.default: [(X,)],
    WAIT: [(X,)],
    aten.squeeze.default: [(X,)],
    aten.squeeze.dim: [(X, 0)],
    aten.squeeze.dims: [(X, [0])],
    aten.unsqueeze.default: [(X, 1), (X, -1)],
    aten.t.default: [(X,)],
    aten.transpose.int: [(X, 0, -1)],
    aten.permute.default: [(X, [1, 0]), (X, [-2, -1])],
    aten.expand.default: [(X, [3, 4, 6]), (X, [3, -1, -1])],
    aten.slice.Tensor: [(X, 0, 1, 3), (X, 1, -4, 9223372036854775807), (X, -1, 2, 2), (X,)],
    aten.select.int: [(X, 0, 2), (X, 1, -1)],
    aten.split.Tensor: [(X, 3), (X, 4, 1), (X, 4, 0)],
    aten.split_with_sizes.default: [(X, [1, 3]), (X, [2, 4], 1), (X, [2, 4], -1)],
    aten.split_with_sizes_copy.default: [(X, [1, 3]), (X, [2, 4], 1)],
    aten.chunk.default: [(X, 3), (X, 4, 1)],
    aten.unbind.int: [(X,), (X, 1), (X, -1)],
    aten.cat.default: [([X, Z],), ([X, Y], 1), ([X, Y], -1)],
    aten.stack.default: [([X, Y],), ([X, Y], 1), ([X, Y], -1)],
    aten._chunk_cat.default: [([X, Z], 0, 2), ([Z, X], 0, 3), ([X, Z], 0, 5)],
    aten.constant_pad_nd.default: [(X, [0, 0, 0, 2]), (X, [1, 2, 3, 4], 1.0), (X, [0, 3])],
    aten.zeros.default: [([2, 3],)],
    aten.ones.default: [([2, 3],)],
    aten.full.default: [([2, 3], 1)],
    aten.zeros_like.default: [(X,)],
    aten.ones_like.default: [(X,)],
    aten.full_like.default: [(X, 1)],
    aten.zero.default: [(X,)],
    aten.fill.Scalar: [(X, 1)],
    aten.copy.default: [(X, Y)],
    aten.new_zeros.default: [(X, [2, 3])],
    aten.new_ones.default: [(X, [2, 3])],
    aten.new_full.default: [(X, [2, 3], 1)],
    aten.scalar_tensor.default: [(1.0,)],
    aten._to_copy.default: [(X,)],
    aten.div.Scalar: [(X, 3.0), (X, 7), (X, 1)],
    aten.div.Tensor: [(X, 3.0), (X, 7), (X, 1.0)],
    aten.mul.Scalar: [(X, 0.3), (X, 3), (X, 1)],
    aten.mul.Tensor: [(X, 0.3), (X, 1.0), (X, Y), (X, X)],
    aten.neg.default: [(X,)],
    aten.add.Tensor: [(X, Y), (X, X)],
    aten.sub.Tensor: [(X, Y), (X, X)],
    aten.view.dtype: [(X, torch.uint8)],
    JOIN_FEATURES: [([X, Y], 4)],
    SPLIT_FEATURES: [(X, [2, 4], [4, 4])],
    SIZE_TENSOR: [([3, 0, 3, 7], torch.int64, torch.device("cpu")), ([2], torch.int32, torch.device("cpu"))],
}
DTYPES = {
    aten.div.Scalar: FLOATS,
    aten.div.Tensor: FLOATS,
    aten.mul.Scalar: FLOATS,
    aten.mul.Tensor: FLOATS,
    aten.neg.default: (*FLOATS, torch.int64, torch.int32, torch.uint8),
    aten.sub.Tensor: (*FLOATS, torch.int64, torch.int32, torch.uint8),
    aten.view.dtype: (*FLOATS, torch.int64, torch.int32),
}
TAKE_DTYPE = {
    aten._to_copy.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.scalar_tensor.default,
}


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {X: (4, 6), Y: (4, 6), Z: (2, 6)}
    return {name: random_bits(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def replaced(args: object, values: dict[str, object]) -> object:
    if isinstance(args, (list, tuple)):
        return type(args)(replaced(each, values) for each in args)
    return values[args] if isinstance(args, str) else args


def test_every_rule_and_every_axiom_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()
    assert {name for name, _ in RULES.values()} | {
        "all-gather",
        "packed all-to-alls",
        "fused lookups",
        "offloading",
        "NaNs",
        "exact kernels",  # tests/fusion
        "rows",  # test_rows.py
        "exchanged sizes",  # test_sizes.py
        "columns side by side",  # test_columns.py
        "operators",  # test_operators.py
        "lists",  # test_lists.py
        "eager's place",  # test_eager_gradients.py
        "eager's order",
    } == AXIOMS.keys()


@pytest.mark.parametrize("target", CASES, ids=str)
def test_rule_says_what_the_operator_computes(target: object) -> None:
    check_rule(target, "cpu")


@pytest.mark.gpu
def test_rules_say_what_operators_compute_on_a_gpu() -> None:
    for target in CASES:
        if target != SIZE_TENSOR:  # makes what the host knows
            check_rule(target, "cuda")


def check_rule(target: object, device: str) -> None:
    torch.manual_seed(0)
    num_compared = 0
    for dtype in DTYPES.get(target, ALL):
        inputs = inputs_of(dtype)
        on_device = {name: x.to(device) for name, x in inputs.items()}
        values = Values()
        numbers: dict[str, object] = {
            name: values.tensor(dtype, tuple(x.shape), values.source(("input", name), x.numel()))
            for name, x in inputs.items()
        }
        for args in CASES[target]:
            to = ALL if target == aten._to_copy.default else (dtype,)
            for kwargs in [{"dtype": each} for each in to] if target in TAKE_DTYPE else [{}]:
                if target in TAKE_DTYPE:
                    kwargs["device"] = torch.device(device)
                expected = target(*replaced(args, on_device), **kwargs)
                found = RULES[target][1](values, expected, *replaced(args, numbers), **kwargs)
                if dtype in FLOATS and kwargs.get("dtype") in INTEGERS and target == aten._to_copy.default:
                    assert found is None  # of fractions that are too large kernels make different integers
                else:
                    num_compared += compared(values, found, expected, on_device)
    assert num_compared


def compared(values: Values, found: object, expected: object, inputs: dict[str, Tensor]) -> int:
    if isinstance(expected, (list, tuple)):
        assert isinstance(found, list)
        return sum(compared(values, x, y, inputs) for x, y in zip(found, expected, strict=True))
    assert isinstance(found, Value)
    got = materialized(values, found, inputs)
    assert got.shape == expected.shape
    assert same_but_nans(got, expected.contiguous())
    return 1


def test_bytes_come_back() -> None:
    values = Values()
    x = torch.randn(4, 6)
    number = values.tensor(x.dtype, (4, 6), values.source(("input", X), 24))
    rule = RULES[aten.view.dtype][1]
    some = rule(values, x.view(torch.uint8), number, torch.uint8)
    assert isinstance(some, Value)
    assert rule(values, x, some, torch.float32) is number
    # Of bytes that are none of one element, nothing is said.
    (part,) = [values.moved(torch.uint8, (4, 8), some.pieces[:1])] if some.pieces else []  # fewer than it has
    shifted = values.moved(torch.uint8, (4, 24), tuple(p._replace(offset=2) for p in part.pieces or ()))
    assert rule(values, x, shifted, torch.float32) is None


def test_all_gather_keeps_ranks_and_elements_apart() -> None:
    values = Values()
    x = values.tensor(torch.float32, (3,), values.source(("input", X), 3))
    found = gathered(values, x, 2, "0", (6,))
    assert found is not None
    (piece,) = found.pieces or ()
    assert values.key(piece.source) == ("remote", ("0",), None, (values.source(("input", X), 3),))
    assert piece.dims == ((6, 1, 1),)
    assert gathered(values, x, 2, "1", (6,)) is not found


@pytest.mark.parametrize("first", [0, 1, 2])
def test_all_gather_of_a_part(first: int) -> None:
    """Rank 0 may send the beginning where rank 1 sends the end: it is no part of what comes where all send all."""
    values = Values()
    x = values.tensor(torch.float32, (4,), values.source(("input", X), 4))
    slice_ = RULES[aten.slice.Tensor][1]
    part = slice_(values, None, x, 0, first, first + 2)
    some, all_ = gathered(values, part, 2, "0", (2, 2)), gathered(values, x, 2, "0", (2, 4))
    assert some is gathered(values, part, 2, "0", (2, 2))
    assert some is not slice_(values, None, all_, 1, first, first + 2)


def exchanged(sent: list[Tensor], splits: list[list[int]]) -> list[Tensor]:
    """Returns what an all-to-all brings each rank; ``splits`` says, per rank, how many rows it sends to each."""
    parts = [tensor.split(rows) for tensor, rows in zip(sent, splits, strict=True)]
    return [torch.cat(to_rank) for to_rank in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtypes", [[each] * 2 for each in ALL] + [[torch.int64, torch.bfloat16]], ids=str)
def test_what_is_packed_brings_what_it_brings_alone(dtypes: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    num_ranks = 3
    members = []  # per all-to-all: what each rank sends, and how many rows to each rank
    for dtype, row in zip(dtypes, ((), (2, 3)), strict=True):
        splits = torch.randint(0, 4, (num_ranks, num_ranks)).tolist()
        members.append(([random_bits((sum(rows), *row), dtype, rank) for rank, rows in enumerate(splits)], splits))
    alone = [exchanged(*member) for member in members]
    packed = [
        pack_all_to_all([sent[rank] for sent, _ in members], [n for _, splits in members for n in splits[rank]])
        for rank in range(num_ranks)
    ]
    units = [1, 6]  # elements of a row
    sizes = [1 if dtype == packed[0].dtype else dtype.itemsize for dtype in dtypes]
    totals = [
        [
            sum(splits[rank][to] * unit * size for (_, splits), unit, size in zip(members, units, sizes, strict=True))
            for to in range(num_ranks)
        ]
        for rank in range(num_ranks)
    ]
    received = exchanged(packed, totals)
    for rank in range(num_ranks):
        found = unpack_all_to_all(
            received[rank],
            [splits[other][rank] for _, splits in members for other in range(num_ranks)],
            [2, 3],
            [0, 2],
            dtypes,
        )
        assert all(same_bits(a, b[rank]) for a, b in zip(found, alone, strict=True))


def test_sums_do_not_commute_with_unlike_moves() -> None:
    """Control: the sum of a tensor and its transpose is not the sum of what they are made of."""
    values = Values()
    x = values.tensor(torch.float32, (3, 3), values.source(("input", X), 9))
    y = values.tensor(torch.float32, (3, 3), values.source(("input", Y), 9))
    rule, transpose = RULES[aten.add.Tensor][1], RULES[aten.t.default][1]
    fake = torch.empty(3, 3)
    turned = [transpose(values, fake, each) for each in (x, y)]
    assert rule(values, fake, *turned) is transpose(values, fake, rule(values, fake, x, y))
    assert rule(values, fake, turned[0], y) is not rule(values, fake, x, y)
    assert rule(values, fake, x, y) is rule(values, fake, y, x)
    assert rule(values, fake, rule(values, fake, x, y), y) is not rule(values, fake, x, rule(values, fake, y, y))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_are_computed_alone(dtype: torch.dtype, device: str) -> None:
    """In vectors and their tails, at every offset, with all kinds of numbers; a NaN may have another payload."""
    size = 71
    x, y = (random_bits((size + 32,), dtype, seed).to(device) for seed in (0, 1))
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [
        *(lambda a, _, to=to: a.to(to) for to in FLOATS),
        lambda a, _: a / 3,
        lambda a, _: a * 0.3,
        lambda a, _: -a,
        torch.add,
        torch.mul,
        torch.sub,
    ]
    for function in functions:
        whole = function(x, y)
        for offset in range(32):
            part = function(x[offset : offset + size], y[offset : offset + size])
            assert same_but_nans(part, whole[offset : offset + size])
            assert same_but_nans(function(x[offset : offset + 3], y[offset : offset + 3]), part[:3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_exact(dtype: torch.dtype, device: str) -> None:
    x, y = (random_bits((1000,), dtype, seed).to(device) for seed in (0, 1))
    assert same_but_nans(x * 1.0, x)
    assert same_but_nans(x / 1, x)
    assert same_but_nans(x.neg().neg(), x)
    assert same_but_nans(x - y, x + -y)
    assert same_but_nans(x + y, y + x)
    assert same_but_nans(x * y, y * x)
    assert same_but_nans(x - 0.0, x)
    assert same_but_nans(x + -0.0, x)
    assert not same_but_nans(x + 0.0, x)
    assert same_but_nans(x * -1, -x)
    assert same_but_nans(x + x, x * 2.0)
    assert same_but_nans(x * 2 * 4, x * 8)
    assert all(same_but_nans(x / 2.0**power, x * 2.0**-power) for power in (-8, -1, 1, 8))
    assert all(same_but_nans((-x).to(to), -x.to(to)) for to in FLOATS)
    assert not same_but_nans(x * 2 * 0.5, x)  # control: of the largest numbers it is infinite
    values = Values()
    number = values.tensor(dtype, (1000,), values.source(("input", X), 1000))
    for wide in FLOATS:
        is_exact = elements.cast(values, elements.cast(values, number, wide), dtype) is number
        assert is_exact == same_but_nans(x.to(wide).to(dtype), x), wide


def test_constants_have_a_dtype() -> None:
    values = Values()
    one = elements.repeated(values, torch.int32, (3,), elements.constant(values, torch.float32, 1.0))
    cast = elements.cast(values, one, torch.float32)
    assert cast is not elements.repeated(values, torch.float32, (3,), elements.constant(values, torch.float32, 1.0))
    zero = elements.repeated(values, torch.float32, (3,), elements.constant(values, torch.float32, 0.0))
    half = elements.cast(values, zero, torch.bfloat16)
    assert half is elements.repeated(values, torch.bfloat16, (3,), elements.constant(values, torch.bfloat16, 0.0))
