"""A module's own tensors, as whatever holds them beside the module meets them while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import new_class
from typing import Any

import torch
from torch import nn

from graphpasses._torch.pytree import tree_map


@contextmanager
def held_traced(state: dict[str, torch.Tensor], traced: dict[str, torch.Tensor], held: set[str]) -> Iterator[None]:
    """Gives whoever holds a module's own tensor, as in a list of what is regularised, the one that is traced.

    The tensors of ``state`` themselves are of another class in the block, which calls functions with those of
    ``traced`` under the same names; ``held`` gets the names for which that happened.
    """
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    thread = threading.get_ident()

    def traced_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (name := names.get(id(value))) is None:
            return value
        held.add(name)
        return traced[name]

    def call(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given: Any = (args, kwargs or {})
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_traced and threading.get_ident() == thread:
            given = tree_map(traced_of, given)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*given[0], **given[1])

    members = {"__slots__": (), "__torch_function__": classmethod(call)}
    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor, nn.Parameter)
    classes = {kind: new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(members)) for kind in kinds}
    changed = [(tensor, type(tensor)) for tensor in state.values() if type(tensor) in classes]
    try:
        for tensor, kind in changed:
            tensor.__class__ = classes[kind]
        yield
    finally:
        for tensor, kind in changed:
            tensor.__class__ = kind
