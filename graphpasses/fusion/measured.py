"""Functions of half precision whose kernel was compared with eager's on all 65,536 values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch.exact_kernels import compile_exactly
from graphpasses._torch.fake_mode import real_tensors
from graphpasses._torch.schemas import schemas
from graphpasses.analysis.levels import grouped
from graphpasses.fusion import exact_operators
from graphpasses.fusion.adversarial import num_different
from graphpasses.fusion.exact_operators import MEASURED, Function, run_exactly
from graphpasses.fusion.kept import keep, read_kept

_NUM_VALUES = 2**16
_TAIL = 15  # elements, fewer than a vector has
_NUM_GRADIENTS = 16  # with which each value is tried, of functions of two


def exact_functions(wanted: Collection[Function]) -> frozenset[Function]:
    """Returns those functions whose kernel has eager's bits on this machine, measured once and kept on disk.

    A function counts whose results are eager's on all values, in vectors and in tails: eager's own may differ between
    these, and then depend on the place.
    """
    known = read_kept("exact_functions")
    missing = sorted((each for each in wanted if _name(*each) not in known), key=str)
    for functions in grouped(missing, key=lambda each: each[1]):
        with real_tensors():
            is_equal = _compare([target for target, _ in functions], functions[0][1])
        known |= {_name(*each): equal for each, equal in zip(functions, is_equal, strict=True)}
    if missing:
        keep("exact_functions", known)
    return frozenset(each for each in wanted if known[_name(*each)])


def _name(target: Any, dtype: torch.dtype) -> str:
    return f"{target} {dtype}"


def _compare(targets: Sequence[Any], dtype: torch.dtype) -> list[bool]:
    values = torch.arange(_NUM_VALUES).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    values = values[torch.randperm(_NUM_VALUES, generator=generator)].repeat(_NUM_GRADIENTS)
    gradients = torch.randn(len(values), generator=generator).to(dtype)

    def results(call: Callable[..., Any], values: torch.Tensor, gradients: torch.Tensor) -> list[torch.Tensor]:
        given = [(gradients, values) if len(schemas(target)[0].arguments) == 2 else (values,) for target in targets]
        return [call(target, args, {}) for target, args in zip(targets, given, strict=True)]

    counts = [0] * len(targets)
    for size in (len(values), _TAIL):
        inputs = [values[:size].clone(), gradients[:size].clone()]
        kernel = compile_exactly(functools.partial(results, run_exactly), inputs)
        end = len(values) if size > _TAIL else _NUM_VALUES + _TAIL
        for start in range(0, end - size + 1, size):
            given = [each[start : start + size].clone() for each in (values, gradients)]
            expected = results(lambda target, args, kwargs: target(*args, **kwargs), *given)
            found = kernel([*given])
            counts = [count + num_different(*pair) for count, *pair in zip(counts, expected, found, strict=True)]
    return [count == 0 for count in counts]


def functions_in(nodes: Iterable[fx.Node]) -> frozenset[Function]:
    """Returns which functions are called that may be measured."""
    return frozenset(
        (node.target, node.meta["val"].dtype)
        for node in nodes
        if node.target in MEASURED and node.meta["val"].dtype in exact_operators.LOW
    )
