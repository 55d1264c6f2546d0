"""Which attributes of modules a piece of code reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

__all__ = ["MISSING", "MODULE_STATE", "attributes_watched"]

# What every module has of torch's own: parameters, hooks, its mode.
MODULE_STATE = frozenset(vars(nn.Module()))
MISSING: Any = object()


@contextmanager
def attributes_watched(
    on_read: Callable[[nn.Module, str, Any], None], on_write: Callable[[nn.Module, str], None]
) -> Iterator[None]:
    """Reports, inside the block, each attribute of a module that Python code reads or sets.

    torch's own (:data:`MODULE_STATE`) and names with double underscores are left out.

    Args:
        on_read: called with the module, the attribute's name, and its value, or :data:`MISSING` where neither the
            module nor its class has it; so it is with parameters, buffers and submodules.
        on_write: called with the module and the name before it is set.
    """
    set_attribute = nn.Module.__setattr__

    def get_attribute(self: nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(self, name)
        except AttributeError:
            if name not in MODULE_STATE and name[:2] != "__":
                on_read(self, name, MISSING)
            raise
        if name not in MODULE_STATE and name[:2] != "__":
            on_read(self, name, value)
        return value

    def set_and_report(self: nn.Module, name: str, value: Any) -> None:
        if name not in MODULE_STATE:
            on_write(self, name)
        set_attribute(self, name, value)

    with (
        mock.patch.object(nn.Module, "__getattribute__", get_attribute),
        mock.patch.object(nn.Module, "__setattr__", set_and_report),
    ):
        yield
