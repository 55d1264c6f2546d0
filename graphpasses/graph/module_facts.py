"""What a captured step takes for granted of one module of its model."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_hooks import hook_ids
from graphpasses._torch.module_reads import MISSING
from graphpasses._torchtitan import wrapped_class
from graphpasses.graph.plain_values import (
    ABSENT,
    are_alike,
    describe_difference,
    is_identity,
    is_shared,
    parts_of,
    plain_key,
    value_key,
)

__all__ = ["AttributesRead", "ModuleFacts", "SharedValue"]


@dataclass(frozen=True)
class AttributesRead:
    """What the step read of a module's own attributes while it was traced.

    Args:
        names: those that there were.
        absent: those that there were not, as ``getattr(self, name, default)`` finds.
        set_once: by name, the keys of the values before and after, of an attribute that forward sets at its first
            call.
    """

    names: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    set_once: Mapping[str, tuple[Hashable, Hashable]] = field(default_factory=dict)


class SharedValue:
    """A value that may change in place, as a list or a ``config``, and what it held when the step was captured.

    Args:
        value: the value.
        key: what tells it from others.
    """

    __slots__ = ("_ids", "_kept", "_nested", "key", "value")

    def __init__(self, value: Any, key: Hashable) -> None:
        self.value, self.key = value, key
        is_plain = plain_key(value) is not None
        # kept, so that no other has an id of theirs
        self._kept = () if is_plain else _held(value)
        self._ids = tuple(map(id, self._kept))
        containers = [item for item in self._kept if is_shared(item, None)]
        self._nested = [(item, value_key(item)) for item in ([value] if is_plain else containers)]

    def holds(self) -> bool:
        """Whether the value still is what it was."""
        same = not self._ids or self._ids == tuple(map(id, _held(self.value)))
        if same and all(value_key(item) == key for item, key in self._nested):
            return True
        return value_key(self.value) == self.key


def _held(value: Any) -> tuple[Any, ...]:
    """Returns an object's attributes or a container's items: fast, since each call of a step asks."""
    if isinstance(value, (list, tuple, deque)):
        return tuple(value)
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple((parts_of(value) or {}).values())


@dataclass(frozen=True)
class ModuleFacts:
    """Facts about one module: its class, its mode, its hooks, its names, and the attributes that the step read.

    Args:
        kind: its class.
        training: whether it is in training mode.
        hooks: the numbers of its hooks.
        forward: the ``forward`` that was set on the module itself, if any.
        parameters: the names of its own parameters, also of those that are None.
        buffers: likewise of its buffers.
        read: which of its attributes the step read.
        values: their values.
        keys: what tells these values from others.
        ids: of the class, the mode and the values, which are kept, so that no other object has them.
        getter: reads the class, the mode and the values.
    """

    kind: type
    training: bool
    hooks: tuple[int, ...]
    forward: Any
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    read: AttributesRead
    values: tuple[Any, ...]
    keys: tuple[Hashable, ...]
    ids: tuple[int, ...]
    getter: attrgetter[Any]

    @classmethod
    def of(cls, module: nn.Module, read: AttributesRead) -> ModuleFacts:
        """Reads a module.

        Args:
            module: the module.
            read: which of its attributes count.
        """
        state = vars(module)
        values = tuple(getattr(module, name, MISSING) for name in read.names)
        getter = attrgetter("__class__", "training", *read.names)
        return cls(
            type(module),
            module.training,
            hook_ids(module),
            state.get("forward"),
            tuple(module._parameters),
            tuple(module._buffers),
            read,
            values,
            tuple(map(value_key, values)),
            tuple(map(id, (type(module), module.training, *values))),
            getter,
        )

    def holds(self, module: nn.Module) -> bool:
        """Whether nothing changed, as far as this can be told at a glance.

        Args:
            module: the module, or what now is in its place.
        """
        state = vars(module)
        try:
            ids = tuple(map(id, self.getter(module)))
        except AttributeError:
            return False
        return (
            ids == self.ids
            and hook_ids(module) == self.hooks
            and state.get("forward") is self.forward
            and (not self.read.absent or self.read.absent.isdisjoint(state))
        )

    def tensors(self, module: nn.Module) -> list[torch.Tensor | None]:
        """Returns the module's own parameters and then buffers, by the names that they had.

        Args:
            module: the module.
        """
        if not self.parameters and not self.buffers:
            return []
        state = vars(module)
        parameters, buffers = state["_parameters"], state["_buffers"]
        return [*map(parameters.get, self.parameters), *map(buffers.get, self.buffers)]

    def shared_values(self) -> Iterator[SharedValue]:
        """Yields those of the values that may change in place."""
        for value, key in zip(self.values, self.keys, strict=True):
            if is_shared(value, key):
                yield SharedValue(value, key)

    def difference(self, module: nn.Module, path: str, *, is_same_model: bool = True) -> str:
        """Says how a module differs from what it was; empty if it does not.

        Args:
            module: the module, or what now is in its place.
            path: its FQN.
            is_same_model: whether its hooks, functions and tensors must be the same ones.
        """
        name = f"module {path!r}" if path else "the model"
        if type(module) is not self.kind and (is_same_model or not _are_made_alike(type(module), self.kind)):
            kinds = self.kind.__name__, type(module).__name__
            return "{} was a {} when the step was captured, and is a {} now".format(name, *kinds)
        if module.training != self.training:
            mode = "training" if self.training else "evaluation"
            return f"{name} was in {mode} mode when the step was captured, and is not now"
        hooks, forward = hook_ids(module), vars(module).get("forward")
        if hooks != self.hooks if is_same_model else len(hooks) != len(self.hooks):
            return f"hooks of {name} were added or removed since the step was captured"
        if forward is not self.forward if is_same_model else (forward is None) != (self.forward is None):
            return f"forward of {name} was replaced since the step was captured"
        known = {
            name: (value, key)
            for name, value, key in zip(self.read.names, self.values, self.keys, strict=True)
        }
        known |= dict.fromkeys(self.read.absent, (MISSING, ABSENT))
        for attribute, (before, key) in known.items():
            value = getattr(module, attribute, MISSING)
            now = value_key(value)
            if now in (key, *self.read.set_once.get(attribute, ())):
                continue
            if not is_same_model and is_identity(key) and are_alike(before, value):
                continue
            return describe_difference(f"{path}.{attribute}" if path else attribute, key, now)
        return ""


def _are_made_alike(kind: type, other: type) -> bool:
    return bool(_made_of(kind)) and _made_of(kind) == _made_of(other)


def _made_of(kind: type) -> tuple[Hashable, ...]:
    """Returns the parts of a class that SimpleFSDP or ``torch.nn.utils.parametrize`` makes for each model, or ()."""
    base = kind.__bases__[0]
    if (
        kind.__name__ == f"Parametrized{base.__name__}"
    ):  # its parametrizations are modules, and compared as such
        return base, *sorted(name for name, value in vars(kind).items() if isinstance(value, property))
    return wrapped_class(kind)
