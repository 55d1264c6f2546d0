"""Strides of a compiled graph that are others than it was traced with: what eager's kernels get, and what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.aot_values import is_tangent
from graphpasses._torch.symbols import example_size
from graphpasses.analysis.effects import operator_effects
from graphpasses.graph.nodes import named_call

# Of inputs, by position: their dims in the order of memory, and whether they see an element several times.
_Orders = tuple[tuple[int, tuple[int, ...], bool], ...]


def runner(
    module: fx.GraphModule, other: Callable[[], fx.GraphModule] | None, note: Callable[[str], None]
) -> Callable[[list[Any]], Any]:
    """Returns what runs a compiled graph; ``note`` is told where strides may round otherwise than in eager.

    torch traces by fake tensors. Where a fake kernel gets strides wrong, a view may have become a copy, or a formula
    another: the first run looks at each operator, and ``other`` runs from the second on, if all strides are right.
    Gradients of outputs may arrive in other strides than the outputs'. Eager's kernels get them so, and so does the
    graph, but for those of which it computes otherwise than by rounding, if they are random numbers: a formula that
    would have copied them was traced without the copy. Of those it gets copies, in the strides of its trace.
    """
    placeholders = enumerate(module.graph.find_nodes(op="placeholder"))
    gradients = ((index, node.meta["val"]) for index, node in placeholders if is_tangent(node))
    traced = {index: value.stride() for index, value in gradients if value.layout is torch.strided}
    runs: list[fx.GraphModule] = []  # from the second run on

    def forward(values: Sequence[Any]) -> Any:
        if runs:
            return runs[0].forward(*values)
        watched = _Watched(module, note)
        results = watched.run(*values)
        runs.append(module if other is None or watched.is_noted else other())
        return results

    if not traced:  # a forward graph
        return forward
    effects = [operator_effects(node) for node in module.graph.nodes if node.op == "call_function"]
    runs_twice = not any(each.writes or each.has_hidden_state or each.group is not None for each in effects)
    not_alike: dict[_Orders, list[int]] = {}  # the gradients that are copied

    def run(values: list[Any]) -> Any:
        expected = {index: _strides_for(values[index].shape, was) for index, was in traced.items()}
        others = tuple(
            (index, _order(values[index].stride()), 0 in values[index].stride())
            for index, strides in expected.items()
            if not are_strides_alike(values[index].shape, strides, values[index].stride())
        )
        if not others:
            return forward(values)

        def copied(values: Sequence[Any], every: Collection[int]) -> list[Any]:
            copies = [*values]
            for index in every:
                value = values[index]
                empty = torch.empty_strided(value.shape, expected[index], dtype=value.dtype, device=value.device)
                copies[index] = empty.copy_(value)
            return copies

        if others not in not_alike:
            not_alike[others] = every = [index for index, *_ in others]
            if runs_twice:
                tried = [*values]
                for index in every:
                    tried[index] = _random_like(values[index])
                results = forward(copied(tried, every))
                not_alike[others] = [
                    index for index in every if not is_alike(results, copied(tried, {*every} - {index}))
                ]
        return forward(copied(values, not_alike[others]))

    def is_alike(results: Any, tried: list[Any]) -> bool:
        try:
            return _differ_by_rounding(results, forward([*tried]), [tried[index] for index in traced])
        except RuntimeError as error:  # a view that a formula makes of a copy
            note(
                "a gradient arrives in other strides than its output has, and the compiled backward gets a copy "
                f"({error}): it may round otherwise than eager's. Call .contiguous() on what the compiled model "
                "returns"
            )
            return False

    return run


def _order(strides: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """Returns the dims of a tensor in the order of its memory."""
    sizes = [example_size(stride) for stride in strides]
    return tuple(sorted(range(len(strides)), key=lambda dim: sizes[dim][0], reverse=True))


def _strides_for(shape: Sequence[int], traced: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """Returns the strides that a gradient was traced with, for sizes that vary those of a dense tensor."""
    if all(type(stride) is int for stride in traced):
        return tuple(traced)  # type: ignore[arg-type]
    strides, step = [0] * len(shape), 1
    for dim in reversed(_order(traced)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns numbers in a tensor's strides, in memory which a kernel that does not look at strides may read, too."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    generator = torch.Generator(tensor.device).manual_seed(0)
    size = max(extent, tensor.numel())
    memory = torch.randn(size, dtype=tensor.dtype, device=tensor.device, generator=generator)
    return memory.as_strided(tensor.shape, tensor.stride())


def _differ_by_rounding(results: Any, others: Any, gradients: Sequence[torch.Tensor]) -> bool:
    """Whether two runs computed the same of some gradients, but for rounding."""
    pairs = [*zip(pytree.tree_leaves(results), pytree.tree_leaves(others), strict=True)]
    # What cancels out, as the gradient of a bias before a BatchNorm, is as large as the rounding of the others, or,
    # if all does, of what was given.
    known = [*gradients, *(one for one, _ in pairs if isinstance(one, torch.Tensor))]
    largest = max(map(_size, known), default=0.0)
    return all(
        one is other
        or (
            isinstance(one, torch.Tensor)
            and one.shape == other.shape
            and torch.allclose(one, other, rtol=0, atol=_tolerance(one, largest), equal_nan=True)
        )
        for one, other in pairs
    )


def _size(result: torch.Tensor) -> float:
    if not result.numel() or not (result.is_floating_point() or result.is_complex()):
        return 0.0
    return result.abs().nan_to_num(0, 0).max().item()


def _tolerance(result: torch.Tensor, largest: float) -> float:
    if not (size := _size(result)):
        return 0.0
    eps = torch.finfo(result.dtype).eps
    return size * math.sqrt(eps) + largest * min(32 * eps, 0.03)


class _Watched(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, note: Callable[[str], None]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are those of the operators, as in later runs
        self._note, self.is_noted = note, False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "call_function" or self.is_noted:
            return result
        if (other := next(iter(_other_strides(result, n.meta.get("val"))), None)) is not None:
            self.is_noted, (real, traced) = True, other
            self._note(
                f"{named_call(n)} gives strides {real}, and torch traced it with {traced}: what follows may "
                "round otherwise than in eager. Compare some steps with eager's, or make its operands contiguous"
            )
        return result


def _other_strides(results: Any, fakes: Any) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Yields the strides of results and of fake ones that differ where these mean something."""
    reals, traced = pytree.tree_leaves(results), pytree.tree_leaves(fakes)
    for real, fake in zip(reals, traced, strict=False):
        if not isinstance(real, torch.Tensor) or not isinstance(fake, torch.Tensor):
            continue
        if real.layout is not torch.strided or real.dim() != fake.dim():
            continue
        known = tuple(stride if type(stride) is int else None for stride in fake.stride())
        if not are_strides_alike(real.shape, known, real.stride()):
            yield real.stride(), tuple(fake.stride())


def are_strides_alike(shape: Sequence[int | None], ours: Sequence[int | None], theirs: Sequence[int | None]) -> bool:
    """Whether strides are the same wherever they mean something: not where a dim has one element, or a tensor none.

    Of ours, None is what is not known.
    """
    if 0 in shape:
        return True
    each = zip(shape, ours, theirs, strict=False)
    return all(size == 1 or a is None or a == b for size, a, b in each)
