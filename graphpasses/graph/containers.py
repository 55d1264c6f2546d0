"""Containers of a batch that a library registered with pytree, and of which it knows more than pytree does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Containers:
    """The containers of a library, made anew for each step; of this class, those of which pytree says all."""

    def knows(self, kind: type) -> bool:
        """Whether a class is the library's."""
        return False

    def reject_reason(self, value: Any) -> str | None:
        """Returns why a captured step does not take a container as eager does; None if it does."""
        return None

    def fields_of(self, kind: type) -> Sequence[str] | None:
        """Returns all that a container may be made of, in order, as paths name it; None if it always has all."""
        return None

    def held_items(self, value: Any, items: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns the items that a container has, of those that pytree finds."""
        return items

    def items_by(self, value: Any, items: Mapping[Any, Any], keys: Sequence[Any]) -> Mapping[Any, Any]:
        """Returns the items of a container by the keys that another of its structure has."""
        return items


AS_PYTREE_SAYS = Containers()
