"""The sources that rules make of others: what is computed of their elements, and what people call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphpasses.proof.core.values import Values


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
