"""Tensors of an unknown number of rows, as of a batch whose size varies: what is done alike to each row.

Such a tensor is known by one of its rows, which begins as a row of some input or result. What the rules of operators
that move elements, or compute them alone, say of a tensor with one row they then say of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphpasses._torch import pytree
from graphpasses.proof import elements  # noqa: F401  registers its rules
from graphpasses.proof.core.operators import AXIOMS, RULES
from graphpasses.proof.core.values import Result, Value, Values
from graphpasses.proof.core.views import View
from graphpasses.proof.movement import seen

AXIOM = "rows"
AXIOMS[AXIOM] = (
    "what moves elements inside of each row, or computes them alone, does to each of any number of rows what it does "
    "to one"
)


class RowValues(Values):
    """Numbers for values, of which some are tensors that are known by one of their rows."""

    def of_rows(self, key: Hashable, dtype: torch.dtype, num_rows: Hashable, shape: tuple[int, ...]) -> Value:
        """Returns a tensor of so many rows of a shape, which depends on ``key`` alone."""
        source = self.source(key)
        row = self.tensor(dtype, (1, *shape), self.source(("row", source), math.prod(shape)))
        of = num_rows, row.number
        value = self._value(("other", source), dtype, None, None, source, of)
        self._values.setdefault(("rows", value.rows), value)
        return value

    def row_of(self, value: Result) -> Value | None:
        """Returns a row, [1, columns], of a tensor of an unknown number of rows, or all rows of another."""
        if not isinstance(value, Value) or value.dtype is None:
            return None
        row = value if value.rows is None else self[value.rows[1]]
        is_row = row.shape is not None and len(row.shape) == 2 and (row is value or row.shape[0] == 1)
        return row if is_row else None

    def in_rows(self, num_rows: Hashable, row: Value, key: Hashable) -> Value:
        """Returns a tensor whose rows each have of the sources' what ``row`` has of one; ``key`` is as of another."""
        of, source = (num_rows, row.number), self.source(key)
        value = self._value(("rows", of), row.dtype, None, None, source, of)
        self._values.setdefault(("other", source), value)
        return value


def row_shape(view: View) -> tuple[int, ...] | None:
    """Returns the shape of a row of a tensor whose number of rows is all of its shape that depends on data."""
    rows, *shape = view.shape or (0,)
    is_all = type(rows) is not int and all(type(each) is int for each in shape)
    return tuple(shape) if is_all and not view.is_conj and not view.is_neg else None


class Made(NamedTuple):
    """What rules are told of a result, or of one row of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def by_row(
    values: RowValues,
    target: Any,
    key: Hashable,
    results: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    named: Callable[[Hashable], Hashable] = lambda size: size,
) -> Result:
    """Returns what an operator's rule says of all rows; None where they are not treated alike, or it cannot tell.

    ``key`` is what the call depends on, ``results`` are fake; arguments have values in the places of tensors;
    ``named`` gives numbers of rows that are equal one name.
    """
    fakes = [*results] if isinstance(results, (list, tuple)) else [results]
    tensors = [
        each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Value) and each.dtype is not None
    ]
    numbers: set[Hashable] = {each.rows and named(each.rows[0]) for each in tensors}
    heights = {values[each.rows[1]].shape[0] for each in tensors if each.rows is not None}  # type: ignore[index]
    views = [view for fake in fakes if (view := View.of(fake)) is not None]
    shapes = [shape for view in views if (shape := row_shape(view)) is not None]
    if len(shapes) < len(fakes):
        return None
    name = RULES[target][0]
    keeps_size = name in _KEEPS_SIZE
    if not keeps_size:
        numbers |= {named(view.shape[0]) for view in views}
    if len(numbers) != 1 or None in numbers or not (keeps_size or heights <= {1}) or len(heights) > 1:
        return None

    def row_of(given: Any) -> Any:
        return given if not isinstance(given, Value) or given.rows is None else values[given.rows[1]]

    args, kwargs = pytree.tree_map(row_of, ([*args], {**kwargs}))
    (height,) = heights or {1}
    rows: list[Made] = []
    for view, shape, fake in zip(views, shapes, fakes, strict=True):
        if name == "views":  # as many elements, in one order
            numel = math.prod(shape)
            height = args[0].numel // numel if numel and isinstance(args[0], Value) else 1
        rows.append(Made((height, *shape), view.dtype, fake.device))
    if not ROW_BY_ROW[target](target, rows, *args):
        return None
    found = RULES[target][1](values, rows[0] if fakes == [results] else rows, *args, **kwargs)
    (num_rows,) = numbers
    if isinstance(found, Value):
        return values.in_rows(num_rows, found, ("result", key, None, rows[0].dtype))
    return found and [
        values.in_rows(num_rows, each, ("result", key, part, row.dtype))
        for part, (each, row) in enumerate(zip(found, rows, strict=True))
    ]


# ---- which operators treat rows alike -----------------------------------------------------------------------------


def _picks_inside(target: Any, _: Any, x: Any, *args: Any) -> bool:
    """Whether each row of what is picked lies in one row of the tensor, and at the same place in each."""
    if not isinstance(x, Value) or x.shape is None:
        return False
    given = tuple(tuple(each) if isinstance(each, list) else each for each in args)
    if not all(type(each) in (int, tuple, type(None)) for each in given):
        return False
    places = []
    for num_rows in (3, 5):
        _, views = seen(target, (num_rows, *x.shape[1:]), given)
        if not views or any(
            sizes[:1] != (num_rows,) or steps[0] != x.numel or offset >= x.numel for sizes, steps, offset in views
        ):
            return False
        places.append([(sizes[1:], steps[1:], offset) for sizes, steps, offset in views])
    return places[0] == places[1]


_KEEPS_SIZE = frozenset({"views", "casts", "scaling", "negation", "sums"})
"""Axioms of operators whose result has as many elements as each tensor that they are given."""

# By axiom, when a call of its operators treats all rows alike, by these, rows of what it returns, and its arguments.
_CONDITIONS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("constants", "casts", "scaling", "negation", "sums", "features"), lambda *_: True),
    "views": lambda _, rows, x, *__: isinstance(x, Value) and math.prod(rows[0].shape) == x.numel,
    "joins": lambda _, rows, parts, dim=0, *__: dim % len(rows[0].shape) != 0,
    "picks": _picks_inside,
}
ROW_BY_ROW = {target: _CONDITIONS[name] for target, (name, _) in RULES.items() if name in _CONDITIONS}
"""By operator, whether a call treats all rows alike."""
