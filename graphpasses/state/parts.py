"""The parts of what an optimizer keeps of a parameter: under names, and in containers of tensors there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from graphpasses._torch import pytree


class Part(str):
    """The name of what a container has by a key."""

    base: str  # the container's, which may be a part of another
    kind: type  # the container's
    key: Any
    depth: int  # of containers in which it is

    @classmethod
    def of(cls, base: str, kind: type, key: Any) -> Part:
        part = cls(f"{base}[{key!r}]")
        part.base, part.kind, part.key = base, kind, key
        part.depth = base.depth + 1 if isinstance(base, Part) else 1
        return part


def parts_of(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values with the parts of lists, tuples and dicts that hold tensors in the places of these."""

    def find(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if kind not in _KINDS or not any(map(torch.is_tensor, pytree.tree_leaves(value))):
            yield name, value
            return
        for key, each in value.items() if kind is dict else enumerate(value):
            yield from find(Part.of(name, kind, key), each)

    if _KINDS.isdisjoint(map(type, values.values())):  # asked of each parameter at each call
        return values
    return {name: part for each in values.items() for name, part in find(*each)}


_KINDS = frozenset((list, tuple, dict))


def whole(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what has these parts, in new containers."""
    made = dict(parts)
    while deepest := max((name.depth for name in made if isinstance(name, Part)), default=0):
        found: dict[str, Any] = {}
        kinds: dict[str, Any] = {}
        for name, value in made.items():
            if isinstance(name, Part) and name.depth == deepest:
                found.setdefault(name.base, {})[name.key] = value
                kinds[name.base] = name.kind
            else:
                found[name] = value
        lists = kinds.keys() - {name for name, kind in kinds.items() if kind is dict}
        made = {name: kinds[name](each.values()) if name in lists else each for name, each in found.items()}
    return made


def part_in(values: Mapping[str, Any], name: str) -> Any:
    """Returns what has a name, among parts or in what has them."""
    return part_in(values, name.base)[name.key] if isinstance(name, Part) and name not in values else values[name]


def put_part(values: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Gives what has a name another value, among parts or in what has them; a tuple becomes another."""
    if not isinstance(name, Part) or name in values:
        values[name] = value
    elif isinstance(holder := part_in(values, name.base), tuple):
        put_part(values, name.base, tuple(value if key == name.key else each for key, each in enumerate(holder)))
    else:
        holder[name.key] = value
