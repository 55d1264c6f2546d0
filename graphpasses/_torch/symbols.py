"""Sizes that are symbols: those that only running tells, and dims of a step's inputs while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, resolve_unbacked_bindings

from graphpasses._torch import pytree


def expression(size: int | torch.SymInt) -> Any:
    """Returns a size for arithmetic: a number, or an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def example_size(size: int | torch.SymInt) -> tuple[int, int]:
    """Returns what a size was for the batch that was traced, and how many of its parts only running tells.

    For 5 samples here, ``s0 + u1 + u2`` is ``(5, 2)``: this rank's number of samples, and two other ranks'.
    """
    if not isinstance(size, torch.SymInt):
        return size, 0
    unbacked = free_unbacked_symbols(size)
    known = size.node.expr.xreplace(size.node.shape_env.backed_var_to_val | dict.fromkeys(unbacked, 0))
    return int(known), len(unbacked)


@contextmanager
def guessed_sizes(values: Sequence[Any], guess: int = 4096) -> Iterator[None]:
    """Gives sizes that only running tells one guess, torch's own (``partitioners.py``, ``_size_of``).

    To guess by expressions, which torch factors, takes most of the time of splitting a graph, and comes to the same.
    """
    fake_mode = detect_fake_mode(values)
    shape_env = None if fake_mode is None else fake_mode.shape_env
    if shape_env is None:
        yield
        return
    hints = shape_env.var_to_hint_override
    added = [s for s in shape_env.var_to_range if s not in hints and shape_env.is_unbacked_symint(s)]
    hints.update(dict.fromkeys(added, guess))
    try:
        yield
    finally:
        for symbol in added:
            del hints[symbol]


def can_unify_sizes(node: fx.Node, other: fx.Node) -> bool:
    """Whether the sizes that ``node`` brings can take ``other``'s names, which may be named after them already."""
    bindings = node.meta.get("unbacked_bindings") or {}
    for size in _sizes(node.meta.get("val")):
        if isinstance(size, torch.SymInt):
            brought = resolve_unbacked_bindings(size.node.shape_env, bindings) or {}
            return all(
                brought.keys().isdisjoint(free_unbacked_symbols(same)) for same in _sizes(other.meta["val"])
            )
    return True


def unify_sizes(node: fx.Node, other: fx.Node) -> None:
    """Gives the sizes that ``node`` brings the names of those that ``other`` brings, in all fake values."""
    for size, same in zip(_sizes(node.meta.get("val")), _sizes(other.meta.get("val")), strict=True):
        if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
            continue
        symbol, name = size.node.expr, sympy.sympify(expression(same))
        if not symbol.is_Symbol or symbol == name:
            continue
        if name.is_Symbol and free_unbacked_symbols(name):
            size.node.shape_env._rename_unbacked_to(symbol, name)
        else:
            size.node.shape_env._set_replacement(symbol, name, "equal values")


def _sizes(value: Any) -> Iterator[int | torch.SymInt]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from leaf.shape
        elif isinstance(leaf, (int, torch.SymInt)):
            yield leaf


def mark_dims(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Makes dims of a tensor that nobody else holds symbols in the next trace, but for those of size 0 or 1."""
    # How torchtitan's tracer is told. Tested: 2.13. Commands that capture nothing need no Dynamo.
    from torch._dynamo.decorators import mark_dynamic

    mark_dynamic(tensor, list(dims))


def each_size_its_own() -> AbstractContextManager[None]:
    """Gives each dim, in the block, a symbol of its own, also where sizes are equal."""
    return _config.patch(use_duck_shape=False)  # type: ignore[attr-defined, no-any-return]


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
