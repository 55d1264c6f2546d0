"""The sources that rules make of others: what is computed of their elements, and what people call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from graphpasses.proof.core.values import Piece, Value, Values


class Term(NamedTuple):
    """The key of a source each of whose elements is computed of one of each of other sources."""

    kind: str  # see :data:`KINDS`
    parameters: tuple[Any, ...]  # what else counts
    dtype: torch.dtype | None  # in which the operands are read; None if as they are
    operands: tuple[int, ...]  # the other sources


class Kind(NamedTuple):
    """What terms of a kind are."""

    words: str  # what people call one, from its parameters
    compute: Callable[..., torch.Tensor] | None = None  # of tensors and the parameters; None where it takes more


KINDS = {
    "cast": Kind("a cast to {}", lambda x, dtype: x.to(dtype)),
    "mul": Kind("a product with {2}", lambda x, dtype, _, number: (x * number).to(dtype)),
    "div": Kind("a quotient by {2}", lambda x, dtype, _, number, device: (x / number).to(dtype)),
    "neg": Kind("a negative", lambda x: -x),
    "sum": Kind("a sum", lambda x, y: x + y),
    "product": Kind("a product", lambda x, y: x * y),
    "bytes": Kind("the bytes", lambda x, _: x.contiguous().view(torch.uint8)),
    "remote": Kind("an all-gather in {}"),  # of what each rank of a group has
    "told": Kind("a size that a rank tells"),  # what it sends for this one where this rank sends what it has of each
    "tensor": Kind("a tensor"),  # all elements of a value, by its number
}
"""By name; factors are a dtype, and a number as :func:`freeze` has it and as it is."""


def term_of(values: Values, source: int, *kinds: str) -> Term | None:
    """Returns a source's key if it is a term of one of some kinds; by default of any."""
    key = values.key(source)
    return key if isinstance(key, Term) and (not kinds or key.kind in kinds) else None


def pieces_of(values: Values, value: Value) -> Iterable[Piece]:
    """Returns the pieces of a value; of one of an unknown number of rows those of a row."""
    if value.rows is not None:
        value = values[value.rows[1]]
    if value.pieces is None:
        return [] if value.source is None else [Piece(0, (), value.source, 0)]
    return value.pieces


def sources_of(values: Values, source: int) -> Iterator[int]:
    """Yields the sources of a source, without what is done to each element; sums by their summands."""
    pending = [source]
    while pending:
        source = pending.pop(0)
        key = values.key(source)
        if isinstance(key, Term) and key.kind == "tensor":
            pending = [*(piece.source for piece in pieces_of(values, values[key.parameters[0]])), *pending]
        elif isinstance(key, Term):
            pending = [*key.operands, *pending]
        elif key[0] == "row":
            pending = [key[1], *pending]
        elif key[0] != "constant":
            yield source


def name_of(values: Values, source: int) -> str:
    """Returns the name of an input that a source is, or of which it is the padding; nothing of others."""
    key = values.key(source)
    if key[0] == "padding" or (key[0] == "result" and key[1][0] == "input"):
        return str(key[1] if key[0] == "padding" else key[1][1])
    return ""
