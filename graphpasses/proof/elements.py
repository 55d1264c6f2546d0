"""Constants, and exact operators that compute each element alone: they commute with what moves elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpasses._torch.fake_mode import outside_tracing
from graphpasses.graph.nodes import freeze
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.proof.core.operators import AXIOMS, Rule, axiom
from graphpasses.proof.core.values import Piece, Result, Value, Values, whole
from graphpasses.proof.pieces import joined
from graphpasses.proof.terms import Term, term_of

aten = torch.ops.aten

# ---- constants ----------------------------------------------------------------------------------------------------


def constant(values: Values, dtype: torch.dtype | None, value: Any) -> int:
    return values.source(("constant", dtype, *filled(dtype, value)))


def held_numbers(values: Values, held: Any) -> Value | None:
    """Returns a constant tensor of a few integers, of which its bits are known, as these; None of others."""
    if not isinstance(held, tuple) or not isinstance(held[-1], bytes) or held[0] not in _INTEGERS:
        return None
    dtype, _, shape, _, bits = held
    numbers = torch.frombuffer(bytearray(bits), dtype=dtype).tolist() if bits else []
    pieces = [Piece(index, (), constant(values, dtype, each), 0) for index, each in enumerate(numbers)]
    return values.moved(dtype, shape, joined(pieces))


def element(values: Values, dtype: torch.dtype, number: Any) -> int | None:
    """Returns the source of a number as an element; None of what is none, and of one computed that may be rounded."""
    if isinstance(number, Value):
        is_size = number.dtype is None and dtype == torch.int64
        return values.source(("number", dtype, number.number)) if is_size else None
    try:
        return constant(values, dtype, number) if isinstance(number, (int, float, bool)) else None
    except RuntimeError:  # the dtype has no such number: the call will fail
        return None


def repeated(values: Values, dtype: torch.dtype, shape: tuple[int, ...], source: int) -> Value:
    """Returns a tensor all whose elements are a source of one element."""
    return values.moved(dtype, shape, whole(source, math.prod(shape), step=0))


def filled(dtype: torch.dtype | None, value: Any) -> tuple[str, Any]:
    """Returns a constant as text, since 0.0 equals -0.0, and as a number if it equals itself."""
    return _filled(dtype, *freeze(value))  # type: ignore[misc]


@functools.cache
def _filled(dtype: torch.dtype, kind: type, bits: Any) -> tuple[str, Any]:
    value = kind(*map(float.fromhex, bits)) if kind is complex else float.fromhex(bits) if kind is float else bits
    with outside_tracing():
        number = torch.full((), value, dtype=dtype, device="cpu").item()
    return repr(number), number if number == number else None


def _fill(number: int) -> Rule:
    def rule(values: Values, result: Any, *args: Any, **_: Any) -> Result:
        given = args[number] if number >= 0 else number + 2
        source = element(values, result.dtype, given)
        return None if source is None else repeated(values, result.dtype, tuple(result.shape), source)

    return rule


for _number, _targets in (
    (-2, (aten.zero.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)),
    (-1, (aten.ones.default, aten.ones_like.default, aten.new_ones.default)),
    (0, (aten.scalar_tensor.default,)),
    (1, (aten.fill.Scalar, aten.full.default, aten.full_like.default)),
    (2, (aten.new_full.default,)),
):
    axiom("constants", "zeros, ones, full and their like are constant", *_targets)(_fill(_number))


@axiom("sizes", "a tensor of sizes has each of them, in their order", SIZE_TENSOR)
def _size_tensor(values: Values, result: Any, sizes: Sequence[Any], *_: Any) -> Result:
    found = [element(values, result.dtype, size) for size in sizes]
    pieces = [Piece(index, (), source, 0) for index, source in enumerate(found) if source is not None]
    return values.moved(result.dtype, tuple(result.shape), joined(pieces)) if len(pieces) == len(found) else None


# ---- operators that compute element by element --------------------------------------------------------------------

AXIOMS["NaNs"] = (
    "of a NaN it counts that it is one: its sign and payload, which may differ between a vector and its tail, are "
    "not compared, and no operator looks at them; denormals are not flushed to zero; bools from outside are 0 or 1"
)

_CAST_ARGUMENTS = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}


@axiom(
    "casts",
    "a cast of an element, but of a fraction to an integer, depends on that element alone, so it commutes with all "
    "of these; one to a dtype that has all values of the first, and back, changes nothing",
    aten._to_copy.default,
)
def _to_copy(values: Values, result: Any, x: Value, **kwargs: Any) -> Result:
    if x.pieces is None or kwargs.keys() - _CAST_ARGUMENTS or _is_late(result, kwargs.get("non_blocking")):
        return None
    return cast(values, x, result.dtype)


def _is_late(result: Any, non_blocking: Any) -> bool:
    """Whether a copy to the CPU may be read before it is there, as one that an accelerator makes."""
    return bool(non_blocking) and result.device.type == "cpu"


@axiom("casts", AXIOMS["casts"], aten.copy.default)
def _copy(values: Values, result: Any, _: Value, x: Value, non_blocking: bool = False) -> Result:
    is_alike = x.pieces is not None and x.shape == tuple(result.shape) and not _is_late(result, non_blocking)
    return cast(values, x, result.dtype) if is_alike else None


def cast(values: Values, x: Value, dtype: torch.dtype) -> Value | None:
    if x.dtype == dtype:
        return x
    if _is_fraction(x.dtype) and not _is_fraction(dtype) and dtype != torch.bool:
        return None  # of what the dtype does not have, a vector, its tail and a GPU make different integers

    def apply(element: torch.Tensor) -> torch.Tensor | None:
        made = element.to(dtype)
        return made if torch.equal(made.to(element.dtype), element) else None  # devices round alike, but to integers

    terms = [term_of(values, piece.source, "neg") for piece in x.pieces or ()]
    are_negatives = terms and all(term is not None and term.dtype == x.dtype for term in terms)
    if x.dtype in _FLOATS and dtype in _FLOATS and are_negatives:
        positive = cast(values, _negative(values, x), dtype)
        return None if positive is None else _negative(values, positive)
    undone = ("cast", (x.dtype,), dtype) if _holds_all(x.dtype, dtype) else None
    return _lifted(values, x, dtype, ("cast", (dtype,), x.dtype), apply, undone)


def _is_fraction(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _holds_all(wide: torch.dtype | None, narrow: torch.dtype) -> bool:
    if wide in _FLOATS[2:]:
        return narrow in _FLOATS[: _FLOATS.index(wide)]
    return wide in _INTEGERS and narrow in (torch.bool, *_INTEGERS[: _INTEGERS.index(wide)])


_SCALING = (
    "a product or quotient with a number, of no complex ones, depends on one element alone, is rounded once, and "
    "with 1 not at all; a quotient depends on the kind of device"
)


def _scaled(name: str, target: Any) -> Rule:
    def rule(values: Values, result: Any, x: Any, number: Any) -> Result:
        if result.dtype.is_complex:  # products of their parts are added up, in a vector otherwise than in its tail
            return None
        if isinstance(x, Value) and isinstance(number, Value):
            return _combined(values, "product", x, number) if name == "mul" else None
        if not isinstance(x, Value) or x.pieces is None or not isinstance(number, (int, float)):
            return None
        if number == 1 and result.dtype == x.dtype:
            return x
        if name == "mul" and number == -1 and result.dtype == x.dtype:
            return _negated(values, result, x)
        if name == "div" and _is_power_of_two(number):
            return _scaled("mul", aten.mul.Scalar)(values, result, x, 1 / number)
        if x.dtype in _FLOATS and type(number) is int and abs(number) < 1 << 24:
            number = float(number)
        if name == "mul" and result.dtype == x.dtype and (unscaled := _unscaled(values, x, number)):
            return rule(values, result, *unscaled)
        by_device = (result.device.type,) if name == "div" else ()  # CUDA divides by multiplying
        key = (name, (result.dtype, freeze(number), number, *by_device), x.dtype)

        def apply(element: torch.Tensor) -> torch.Tensor | None:
            is_zero = element.item() == 0 and number != 0 and math.isfinite(number)
            return target(element, number) if is_zero or result.device.type == "cpu" else None

        return _lifted(values, x, result.dtype, key, apply)

    return rule


def _is_power_of_two(number: float, *, at_least: float = 2.0**-100) -> bool:
    return at_least <= abs(number) <= 2.0**100 and math.frexp(abs(number))[0] == 0.5


def _unscaled(values: Values, x: Value, number: float) -> tuple[Value, float] | None:
    """Returns of what, and by what, a multiple of a tensor is one, if both factors are 2, 4, 8, …; else None."""
    terms = {piece.source: term_of(values, piece.source, "mul") for piece in x.pieces or ()}
    if any(term is None or not term.dtype == term.parameters[0] == x.dtype for term in terms.values()):
        return None
    factors = {term.parameters[2] for term in terms.values() if term is not None}
    if len(factors) != 1:
        return None
    if not all(each > 0 and _is_power_of_two(each, at_least=1.0) for each in (number, *factors)):
        return None
    number *= factors.pop()
    if not _is_power_of_two(number, at_least=1.0):  # no dtype need have it
        return None
    return of_others(values, x, x.dtype, lambda source: terms[source].operands[0]), number  # type: ignore[union-attr]


axiom("scaling", _SCALING, aten.div.Scalar, aten.div.Tensor)(_scaled("div", aten.div.Scalar))
axiom("scaling", _SCALING, aten.mul.Scalar, aten.mul.Tensor)(_scaled("mul", aten.mul.Scalar))


@axiom(
    "negation",
    "a negative, of no complex number, depends on one element alone, and is the number again if negated",
    aten.neg.default,
)
def _negated(values: Values, result: Any, x: Value) -> Result:
    if x.pieces is None or x.dtype is None or x.dtype.is_complex:  # a tail negates zeros, a vector does not
        return None
    return None if x.dtype == torch.bool else _negative(values, x)


def _negative(values: Values, x: Value) -> Value:
    assert x.dtype is not None
    return _lifted(values, x, x.dtype, ("neg", (), x.dtype), torch.neg, ("neg", (), x.dtype))


def _lifted(
    values: Values,
    x: Value,
    dtype: torch.dtype,
    key: tuple[str, tuple[Any, ...], torch.dtype | None],
    apply: Callable[[torch.Tensor], torch.Tensor | None],
    undone: tuple[str, tuple[Any, ...], torch.dtype | None] | None = None,
) -> Value:
    """Applies to each source what is applied to each element, to a constant at once; undoes what is ``undone``."""

    @functools.cache
    def made_of(source: int) -> int:
        made = values.key(source)
        # Of a constant whose bytes are read in another dtype nothing is known.
        element = _of_constant(made, x.dtype, apply)
        if element is not None:
            return constant(values, dtype, element)
        if isinstance(made, Term) and made[:3] == undone:
            return made.operands[0]
        return values.source(Term(*key, (source,)), values.numel(source))

    return of_others(values, x, dtype, made_of)


def of_others(values: Values, x: Value, dtype: torch.dtype | None, other: Callable[[int], int]) -> Value:
    """Returns a tensor of the elements of ``other`` sources, at the same places there."""
    assert x.pieces is not None
    assert x.shape is not None
    pieces = sorted(piece._replace(source=other(piece.source)) for piece in x.pieces)
    return values.moved(dtype, x.shape, tuple(pieces))


def _of_constant(key: Any, dtype: torch.dtype | None, apply: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Returns what an operator makes of a constant; None where another device may make another, or a CPU none."""
    if key[0] != "constant" or key[1] != dtype or key[3] is None:
        return None
    with outside_tracing():
        try:
            made = apply(torch.full((), key[3], dtype=key[1], device="cpu"))
        except RuntimeError:  # it does not compute in this dtype, or with this number
            return None
        return None if made is None else made.item()


@axiom(
    "sums",
    "a sum, or a product of no complex numbers, of two elements depends on these alone, in any order, so it commutes "
    "with what moves both alike; a difference is the sum with a negative",
    aten.add.Tensor,
)
def _add(values: Values, result: Any, x: Any, y: Any, **kwargs: Any) -> Result:
    if kwargs or not isinstance(x, Value):
        return None
    if isinstance(y, Value):
        return add(values, x, y)
    return x if _is_zero(y, -1.0) and result.dtype == x.dtype in _FLOATS else None


@axiom("sums", AXIOMS["sums"], aten.sub.Tensor)
def _subtract(values: Values, result: Any, x: Any, y: Any, **kwargs: Any) -> Result:
    if kwargs or not isinstance(x, Value):
        return None
    if not isinstance(y, Value):
        return x if _is_zero(y, 1.0) and result.dtype == x.dtype in _FLOATS else None
    negative = _negated(values, result, y)
    return add(values, x, negative) if isinstance(negative, Value) else None


def _is_zero(number: Any, sign: float) -> bool:
    return type(number) is float and number == 0 and math.copysign(1.0, number) == sign


def add(values: Values, x: Value, y: Value) -> Result:
    """Returns the sum of two tensors of one shape and dtype; None where they are not."""
    if x is y and x.dtype in _FLOATS and x.pieces is not None:
        fake = torch.empty(0, dtype=x.dtype, device="meta")  # of which its dtype is read, and its device
        return _scaled("mul", aten.mul.Scalar)(values, fake, x, 2.0)
    return _combined(values, "sum", x, y)


def _combined(values: Values, name: str, x: Value, y: Value) -> Value | None:
    if x.dtype is None or x.dtype != y.dtype or x.shape is None or x.shape != y.shape:
        return None
    if x.pieces is not None and y.pieces is not None and len(x.pieces) == len(y.pieces) == 1:
        (a,), (b,) = x.pieces, y.pieces
        if a[:2] == b[:2] and a.offset == b.offset and values.numel(a.source) == values.numel(b.source):
            operands = sorted((a.source, b.source))
            source = values.source(Term(name, (), x.dtype, (*operands,)), values.numel(a.source))
            return values.moved(x.dtype, x.shape, (a._replace(source=source),))
    tensors = [Term("tensor", (number,), None, ()) for number in sorted((x.number, y.number))]
    term = Term(name, (), x.dtype, tuple(values.source(each, x.numel) for each in tensors))
    return values.tensor(x.dtype, x.shape, values.source(term, x.numel))


# ---- bytes --------------------------------------------------------------------------------------------------------


@axiom("bytes", "view(dtype) keeps a contiguous tensor's bytes", aten.view.dtype)
def _view_dtype(values: Values, result: Any, x: Value, dtype: torch.dtype) -> Result:
    if x.pieces is None or x.dtype is None or x.shape is None or dtype == torch.bool:
        return None
    old, new = x.dtype.itemsize, dtype.itemsize
    if new == 1 and old > 1:
        return values.moved(dtype, tuple(result.shape), tuple(_bytes(values, piece, old) for piece in x.pieces))
    if old == 1 and new > 1:
        found = [_of_bytes(values, piece, dtype) for piece in x.pieces]
        kept = tuple(piece for piece in found if piece is not None)
        return values.moved(dtype, tuple(result.shape), kept) if len(kept) == len(found) else None
    return None


def _bytes(values: Values, piece: Piece, size: int) -> Piece:
    source = values.source(Term("bytes", (size,), None, (piece.source,)), values.numel(piece.source) * size)
    dims = tuple((count, step * size, read * size) for count, step, read in piece.dims)
    if dims and dims[-1][1:] == (size, size):
        dims = (*dims[:-1], (dims[-1][0] * size, 1, 1))
    else:
        dims = (*dims, (size, 1, 1))
    return Piece(piece.start * size, dims, source, piece.offset * size)


def _of_bytes(values: Values, piece: Piece, dtype: torch.dtype) -> Piece | None:
    size, remote = dtype.itemsize, term_of(values, piece.source, "remote")
    of_bytes = term_of(values, piece.source if remote is None else remote.operands[0], "bytes")
    if of_bytes is None or of_bytes.parameters != (size,):
        return None
    (source,) = of_bytes.operands
    if remote is not None:
        source = values.source(remote._replace(operands=(source,)), values.numel(piece.source) // size)
    if not piece.dims or piece.dims[-1][1:] != (1, 1) or piece.dims[-1][0] % size:
        return None
    inner_dim = piece.dims[-1][0] // size
    steps = [each for count, step, read in piece.dims[:-1] for each in (step, read)]
    if any(each % size for each in (piece.start, piece.offset, *steps)):
        return None
    dims = [(count, step // size, read // size) for count, step, read in piece.dims[:-1]]
    dims += [(inner_dim, 1, 1)] if inner_dim > 1 else []
    return Piece(piece.start // size, tuple(dims), source, piece.offset // size)
