"""The name of the module that runs, on every node that is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.fx.traceback import annotate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from graphpasses._torch.recorded_operator import MODULE_FQN


@contextmanager
def module_names_traced(model: nn.Module) -> Iterator[None]:
    """Notes on each node that the block traces which module of a model computes it."""
    names = {module: fqn for fqn, module in reversed([*model.named_modules()])}
    entered: list[tuple[nn.Module, AbstractContextManager[None]]] = []

    def enter(module: nn.Module, _: object) -> None:
        if module in names:
            entered.append((module, annotate({MODULE_FQN: names[module]})))
            entered[-1][1].__enter__()

    def leave(module: nn.Module, *_: object) -> None:
        if entered and entered[-1][0] is module:  # not where another hook raised before it was entered
            entered.pop()[1].__exit__(None, None, None)

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
