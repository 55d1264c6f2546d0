"""Whether the operators of a compiled graph give the strides with which they were traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses.graph.nodes import named_call


def run_watched(module: fx.GraphModule, values: list[Any], note: Callable[[str], None]) -> tuple[Any, bool]:
    """Runs a compiled graph; returns what it returns, and whether all operators gave the strides of the trace.

    ``note`` is told of the first with others.

    torch traces by fake tensors. Where a fake kernel gets strides wrong, a view may have become a copy, or a formula
    another, and kernels behind it may round otherwise than in eager.
    """
    watched = _Watched(module, note)
    return watched.boxed_run(values), not watched.is_noted


class _Watched(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, note: Callable[[str], None]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are those of the operators, as in later runs
        self._note, self.is_noted = note, False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not self.is_noted:
            for real, traced in _other_strides(result, n.meta.get("val")):
                self.is_noted = True
                self._note(
                    f"{named_call(n)} gives strides {real}, and torch traced it with {traced}: what follows may "
                    "round otherwise than in eager. Compare some steps with eager's, or make its operands contiguous"
                )
                break
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
