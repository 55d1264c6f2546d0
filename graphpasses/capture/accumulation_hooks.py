"""Hooks that run behind the accumulation of a gradient, optimizers in backward among them.

A captured step calls them itself, each when its parameter's gradient is there, in the order of eager's backward; but
after the graph, which so must read nothing that a hook has written. Whether it would is asked of eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from graphpasses._torch.module_hooks import accumulation_hooks
from graphpasses._torch.storage import invert_bits
from graphpasses.state.model import trained_state

NOTE = (
    "hooks behind the accumulation of gradients run after the graph, in eager's order: all gradients are held until "
    "then"
)
BEHIND = (
    ". Or backward reads a parameter behind the hook that waits for its gradient, and may write it: a captured step "
    "calls such hooks after the graph. Remove it, and do after the step what it does"
)


@contextmanager
def hooks_set_aside(model: nn.Module, *, calls_hooks: bool = False) -> Iterator[list[str]]:
    """Calls none of these hooks in the block, and yields the FQNs of their parameters, in the order of the calls.

    If it ``calls_hooks`` the block runs as it is, and nothing is noted. From its call on, to the end of the block, a
    parameter has other bits: a hook may write it, and backward's results are others where it reads it after that.
    """
    called: list[str] = []
    inverted: list[torch.Tensor] = []

    def note(fqn: str, parameter: torch.Tensor, *_: object) -> None:
        called.append(fqn)
        if all(each is not parameter for each in inverted):
            inverted.append(parameter)
            invert_bits(parameter)

    places = [
        (fqn, parameter, hooks, number, hooks[number])
        for parameter, fqn in {each: fqn for fqn, each in trained_state(model).items()}.items()
        for hooks, number in ([] if calls_hooks else accumulation_hooks(parameter))
    ]
    try:
        for fqn, parameter, hooks, number, _ in places:
            hooks[number] = partial(note, fqn, parameter)
        yield called
    finally:
        for _, _, hooks, number, hook in places:
            hooks[number] = hook
        for parameter in inverted:
            invert_bits(parameter)
