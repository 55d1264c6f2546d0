"""Functions whose kernel was compared with eager's on all values: half precision's, and float32's on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses._torch.exact_kernels import Kernel, compile_exactly
from graphpasses._torch.fake_mode import real_tensors
from graphpasses._torch.schemas import schemas
from graphpasses.analysis.levels import grouped
from graphpasses.fusion.adversarial import num_different
from graphpasses.fusion.exact_operators import LOW, Function, measured_functions, run_exactly
from graphpasses.fusion.kept import keep, read_kept

_NUM_VALUES = 2**16
_TAIL = 15  # elements, fewer than a vector has
_CHUNK = 2**24  # values of float32 at a time
_NUM_GRADIENTS = 16  # with which each value is tried, of functions of two


def exact_functions(wanted: Collection[Function]) -> frozenset[Function]:
    """Returns those functions whose kernel has eager's bits on this machine, measured once and kept on disk.

    A function counts whose results are eager's on all values, in vectors and in tails: eager's own may differ between
    these, and then depend on the place.
    """
    known = read_kept("exact_functions")
    missing = sorted((each for each in wanted if _name(*each) not in known), key=str)
    for functions in grouped(missing, key=lambda each: each[1:]):
        _, dtype, device = functions[0]
        compare = _compare_halves if dtype in LOW else _compare_all
        with real_tensors():
            is_equal = compare([target for target, *_ in functions], dtype, device)
        known |= {_name(*each): equal for each, equal in zip(functions, is_equal, strict=True)}
    if missing:
        keep("exact_functions", known)
    return frozenset(each for each in wanted if known[_name(*each)])


def _name(target: Any, dtype: torch.dtype, device: str) -> str:
    return f"{target} {dtype} {device}"


def _eagerly(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _has_gradient(target: Any) -> bool:
    return len(schemas(target)[0].arguments) == 2


class _Comparison:
    """Counts where the kernels of functions have other results than eager's; a kernel is of one size."""

    def __init__(self, targets: Sequence[Any]) -> None:
        self._targets, self._kernels = targets, dict[int, Kernel]()
        self.counts = [0] * len(targets)

    def _results(self, call: Callable[..., Any], values: Tensor, gradients: Tensor) -> list[Tensor]:
        given = [(gradients, values) if _has_gradient(each) else (values,) for each in self._targets]
        return [call(target, args, {}) for target, args in zip(self._targets, given, strict=True)]

    def add(self, values: Tensor, gradients: Tensor, size: int) -> None:
        """Compares on values, so many at a time."""
        # The pieces begin where an allocation does: kernels and eager's vectors see them alike.
        pairs = zip(torch.split(values, size), torch.split(gradients, size), strict=True)
        pieces = [[*map(Tensor.clone, pair)] for pair in pairs]
        if size not in self._kernels:
            self._kernels[size] = compile_exactly(partial(self._results, run_exactly), pieces[0])
        expected = [self._results(_eagerly, *each) for each in pieces]
        found = [self._kernels[size](each) for each in pieces]
        for index, pair in enumerate(zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True)):
            self.counts[index] += num_different(*map(torch.cat, pair))


def _compare_halves(targets: Sequence[Any], dtype: torch.dtype, device: str) -> list[bool]:
    """Compares on all values of half precision, in vectors and in tails; with several gradients each.

    Of all pairs these are few: with gradients, float32's results, which are rounded once to half precision, must be
    equal, too.
    """
    values = torch.arange(_NUM_VALUES, device="cpu").to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    values = values[torch.randperm(_NUM_VALUES, generator=generator, device="cpu")].repeat(_NUM_GRADIENTS).to(device)
    gradients = torch.randn(len(values), generator=generator, device="cpu").to(device, dtype)
    comparison = _Comparison(targets)
    comparison.add(values, gradients, len(values))
    in_tails = _NUM_VALUES // _TAIL * _TAIL + _TAIL
    comparison.add(values[:in_tails], gradients[:in_tails], _TAIL)
    counts = dict(zip(targets, comparison.counts, strict=True))
    if with_gradients := [*filter(_has_gradient, targets)]:
        unrounded = _Comparison(with_gradients)
        unrounded.add(values.float(), gradients.float(), len(values))
        for target, count in zip(with_gradients, unrounded.counts, strict=True):
            counts[target] += count
    return [count == 0 for count in counts.values()]


def _compare_all(targets: Sequence[Any], dtype: torch.dtype, device: str) -> list[bool]:
    """Compares functions of one operand on all values of float32; some of each exponent in tails, too."""
    comparison = _Comparison(targets)
    for start in range(-(2**31), 2**31, _CHUNK):
        values = torch.arange(start, start + _CHUNK, device=device).to(torch.int32).view(dtype)
        comparison.add(values, values, _CHUNK)
    values = torch.arange(-(2**31), 2**31, 2**32 // (_NUM_VALUES // 2), device=device).to(torch.int32).view(dtype)
    values = values[: len(values) // _TAIL * _TAIL]
    comparison.add(values, values, _TAIL)
    return [count == 0 for count in comparison.counts]


def functions_in(nodes: Iterable[fx.Node]) -> frozenset[Function]:
    """Returns which functions are called that may be measured."""
    possible = {*measured_functions()}
    return frozenset(
        function
        for node in nodes
        if node.op == "call_function" and isinstance(value := node.meta.get("val"), Tensor)
        if (function := (node.target, value.dtype, value.device.type)) in possible
    )
