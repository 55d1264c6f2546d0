"""Dims of a step's inputs whose sizes are symbols while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

# Sizes that are equal in the example are one symbol by default. Tested: 2.13.
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def mark_dims(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Makes dims of a tensor symbols in the next trace; those of size 0 or 1 are numbers all the same.

    Nobody else may hold the tensor.
    """
    # How torchtitan's tracer is told. Tested: 2.13. Commands that capture nothing need no Dynamo.
    from torch._dynamo.decorators import mark_dynamic

    mark_dynamic(tensor, list(dims))


@contextmanager
def each_size_its_own() -> Iterator[None]:
    """Gives each dim, in the block, a symbol of its own, also where sizes are equal."""
    with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


def size_symbol(size: int | torch.SymInt) -> sympy.Symbol | None:
    """Returns the symbol that a dim of an input was given; None if it is a number."""
    # `node.expr` may be another's, which torch found to be equal since.
    expr = size.node._expr if isinstance(size, torch.SymInt) else None
    return expr if isinstance(expr, sympy.Symbol) else None


def size_condition(size: torch.SymInt) -> sympy.Basic:
    """Returns what the trace takes for granted of a size: torch takes sizes 0 and 1 for others, without a guard."""
    symbol, shape_env = size.node._expr, size.node.shape_env
    limits = shape_env.var_to_range[symbol]
    above = sympy.Ge(symbol, limits.lower) if limits.lower > 0 else sympy.true
    return sympy.And(above, sympy.Le(symbol, limits.upper)) if limits.upper.is_Integer else above


class _Told(list[Any]):
    """Guards on sizes; each new one is reported."""

    decided: Callable[[sympy.Basic], None] | None = None

    def append(self, guard: Any) -> None:
        super().append(guard)
        if self.decided is not None:
            self.decided(guard.expr)


@contextmanager
def sizes_decided_by(shape_env: ShapeEnv, decided: Callable[[sympy.Basic], None]) -> Iterator[None]:
    """Reports what must be true of sizes for the block to be traced as it is."""
    told = shape_env.guards = _Told(shape_env.guards)
    for guard in told:
        decided(guard.expr)
    told.decided = decided
    try:
        yield
    finally:
        told.decided = None


def dim_hint(spec: object) -> tuple[str, int | None, int | None] | None:
    """Returns what ``Dim.AUTO`` and its kin, in ``dynamic_shapes``, say: name, least and largest size."""
    hint: Any = spec
    return (hint.type.name, hint.min, hint.max) if type(spec) is type(torch.export.Dim.AUTO) else None
