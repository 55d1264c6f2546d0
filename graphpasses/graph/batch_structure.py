"""How a batch is nested: taken apart to leaves and put together again, as the types that eager's model sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.types import py_sym_types

from graphpasses._torch import pytree
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.state.carried import as_tensor
from graphpasses.state.keys import Key, is_carried_number, key_of

_LEAVES = (torch.Tensor, int, float, bool, str, type(None), *py_sym_types)  # symbolic in a result that is traced
_BATCH_HOLDS = (
    "a batch holds tensors, numbers, strings and None, in lists, tuples, dicts and dataclasses. Give loss_fn other "
    "objects through its closure, and None in place of what it does not read"
)


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


class Container(NamedTuple):
    """A container of a batch before ``loss_fn`` runs."""

    path: str
    keys: tuple[Any, ...]  # by which it is reached
    value: Any
    items: Mapping[Any, Any]

    def taken(self) -> list[tuple[Any, ...]]:
        """Returns by which keys the items are reached that ``loss_fn`` took out; raises if it put others in."""
        opened = _open(self.value, AS_PYTREE_SAYS)
        now = {} if opened is None else opened[0]
        other = [key for key in now if key not in self.items or now[key] is not self.items[key]]
        gone = [key for key in self.items if key not in now]
        if other or (gone and not isinstance(self.value, Mapping)):
            raise CaptureError(
                f"loss_fn changes {self.path}{_accessor(self.value, (other or gone)[0])} in the batch, and a "
                "captured step would not. Let it change a copy, as dict(batch); set what is read after the step as "
                "an attribute of a module, which the step sets, too"
            )
        return [(*self.keys, key) for key in gone]


@dataclass(frozen=True)
class BatchStructure:
    """A leaf of a batch, or a container with the structures of its items.

    Containers are lists, tuples, named tuples, mappings of any class that can be made from a dict, dataclasses, and
    what is registered with ``torch.utils._pytree``. Code that goes through a mapping sees the order of its keys.
    """

    path: str  # where it is, e.g. ``batch[0]['tokens']``
    kind: type | None = None  # the container's type; None for a leaf
    keys: tuple[Any, ...] = ()  # what names each item: its key, field or position
    children: tuple[BatchStructure, ...] = ()  # the items' structures
    # How pytree makes the container from its items; None for mappings and dataclasses that it does not know.
    spec: pytree.TreeSpec | None = None
    library: Containers = AS_PYTREE_SAYS  # whose container it is
    # Its private attributes beside its items that are plain, each with the key that it had in the captured batch.
    own: Mapping[str, tuple[Any, Key]] = field(default_factory=dict)
    # Of a whole batch, by which keys the items are reached that loss_fn takes out of mappings, as `pop` does.
    taken: tuple[tuple[Any, ...], ...] = ()
    # Of a whole batch, which leaves are one tensor, by which code may decide (`k is v`); () where it does not count.
    same: tuple[int, ...] = ()
    # Of a whole batch, the containers that stand in it before, by path, each with the path where that is.
    shared: Mapping[str, str] = field(default_factory=dict)
    # Of a whole batch, by path the classes of numbers that are others at each call, which a step reads as tensors.
    numbers: Mapping[str, type] = field(default_factory=dict)

    @classmethod
    def of(
        cls, value: Any, *libraries: Containers, path: str = "batch", advice: str = _BATCH_HOLDS
    ) -> BatchStructure:
        """Reads the structure of a batch; refuses what is no leaf and no container that can be made again."""
        kind = type(value)
        library = next((each for each in libraries if each.knows(kind)), AS_PYTREE_SAYS)
        if (reason := library.reject_reason(value)) is not None:
            raise CaptureError(f"{path} {reason}, or use torch.compile(model, backend='graphpasses')")
        opened = _open(value, library)
        if opened is None:
            if not isinstance(value, _LEAVES):
                raise CaptureError(f"{path} is a {kind.__name__}; {advice}")
            return cls(path)
        items, spec = opened
        children = tuple(
            cls.of(item, *libraries, path=path + _accessor(value, key), advice=advice) for key, item in items.items()
        )
        structure = cls(path, kind, tuple(items), children, spec, library)
        structure = replace(structure, own=_own_attributes(structure, value, items))
        _check_that_it_is_made(structure, items)
        return structure

    @property
    def paths(self) -> tuple[str, ...]:
        if self.kind is None:
            return (self.path,)
        return tuple(path for child in self.children for path in child.paths)

    def leaves(self, value: Any) -> list[Any]:
        """Returns the leaves of a batch; raises, and names the part, where its structure is another."""
        if self.kind is None:
            return [value]
        opened = _open(value, self.library)
        if type(value) is not self.kind or opened is None:
            raise BatchMismatchError(
                f"{self.path} is a {type(value).__name__}, and was a {self.kind.__name__} in the captured batch; "
                f"{_AGAIN}"
            )
        if (reason := self.library.reject_reason(value)) is not None:
            raise BatchMismatchError(f"{self.path} {reason}")
        items, spec = opened
        items = self.library.items_by(value, items, self.keys)
        if items.keys() != set(self.keys) or (tuple(items) != self.keys and not self.is_of_library):
            raise BatchMismatchError(f"{self.path} {_difference(self, value, items)}; {_AGAIN}")
        if spec is not None and self.spec is not None and self.is_of_library:
            if spec.context != self.spec.context:
                raise BatchMismatchError(
                    f"{self.path} was of keys {self.spec.context} in the captured batch, and is of {spec.context}; "
                    f"{_AGAIN}"
                )
        elif spec != self.spec and not issubclass(self.kind, Mapping):  # of mappings, the keys were compared
            raise BatchMismatchError(f"{self.path} was {self.spec} in the captured batch, and is {spec}; {_AGAIN}")
        own = _own_attributes(self, value, items)
        for name in {**self.own, **own}:
            was, now = (each.get(name, (None, key_of(None)))[1] for each in (self.own, own))
            if was != now:
                raise BatchMismatchError(
                    f"{self.path}.{name} was {was} in the captured batch, and is {now}; {_AGAIN}"
                )
        parts = (child.leaves(items[key]) for key, child in zip(self.keys, self.children, strict=True))
        return [leaf for part in parts for leaf in part]

    def inputs(self, leaves: Sequence[Any], change: Callable[[Any, type], Any] = as_tensor) -> Sequence[Any]:
        """Returns the leaves of a batch as a step reads them; or ``change`` of those that are its numbers, and of
        their classes.
        """
        if not (of := self.numbers):
            return leaves
        return [change(each, of[path]) if path in of else each for path, each in zip(self.paths, leaves, strict=True)]

    def changed_numbers(self, leaves: Sequence[Any], captured: Sequence[tuple[str, Any]]) -> frozenset[str]:
        """Returns the paths of the leaves that can be its numbers, and are so, or are others than were captured."""
        return frozenset(
            path
            for leaf, (path, before) in zip(leaves, captured, strict=False)
            if is_carried_number(leaf)
            if path in self.numbers or (type(leaf) is type(before) and repr(leaf) != repr(before))
        )

    def sameness_difference(self, same: tuple[int, ...], shared: Mapping[str, str]) -> str | None:
        """Says what is one tensor, or one container, in another batch alone, or was in the captured one alone."""
        for index, (was, now) in enumerate(zip(self.same, same, strict=False)):
            if was != now:
                are = "are one tensor, and were two" if was == index else "were one tensor"
                other = self.paths[now if was == index else was]
                return f"{other} and {self.paths[index]} {are} when the step was captured"
        for path in {**self.shared, **shared}:
            if (before := self.shared.get(path)) != (after := shared.get(path)):
                are = "were one object" if before else "are one object, and were two"
                return f"{before or after} and {path} {are} when the step was captured"
        return None

    def shared_in(self, batch: Any) -> Mapping[str, str]:
        """Returns the containers of a batch, as ``shared`` has them, that are others before; not tuples."""
        first: dict[int, str] = {}
        if self.num_changeable < 2:  # which is known of most batches
            return {}
        paths = {each.path: each.value for each in self.containers(batch) if not isinstance(each.value, tuple)}
        others = {path: first.setdefault(id(value), path) for path, value in paths.items()}
        return {path: other for path, other in others.items() if other != path}

    @cached_property
    def num_changeable(self) -> int:
        """How many containers there are that code may change, which tuples are not."""
        is_one = self.kind is not None and not issubclass(self.kind, tuple)
        return is_one + sum(child.num_changeable for child in self.children)

    def build(
        self, leaves: Iterable[Any], shared: Mapping[str, str] | None = None, made: dict[str, Any] | None = None
    ) -> Any:
        """Makes a value of leaves; of a whole batch, what is ``shared``, and was ``made``, is its own."""
        rest = iter(leaves)
        if self.kind is None:
            return next(rest)
        shared, made = self.shared if shared is None else shared, {} if made is None else made
        children = zip(self.keys, self.children, strict=True)
        items = {key: child.build(rest, shared, made) for key, child in children}
        made[self.path] = made[shared[self.path]] if self.path in shared else self.make(items)
        return made[self.path]

    def fresh(self, batch: Sequence[Any]) -> list[Any]:
        """Returns a batch whose containers are made anew: libraries' keep what they compute, and code changes all."""
        made: dict[int, Any] = {}
        return [child.renewed(value, made) for child, value in zip(self.children, batch, strict=True)]

    def renewed(self, value: Any, made: dict[int, Any]) -> Any:
        """Returns a value of this structure, its containers made anew, in the order of its own keys.

        Of one that stands in ``made``, by its ``id``, that.
        """
        if self.kind is None:
            return value
        if id(value) not in made:
            made[id(value)] = self._made_anew(value, made)
        return made[id(value)]

    def _made_anew(self, value: Any, made: dict[int, Any]) -> Any:
        if self.is_of_library:
            return self.build(self.leaves(value))
        opened, children = _open(value, self.library), dict(zip(self.keys, self.children, strict=True))
        if type(value) is not self.kind or opened is None or opened[0].keys() != children.keys():
            self.leaves(value)  # which raises
        assert opened is not None
        # In the order of the caller's.
        items = {key: children[key].renewed(item, made) for key, item in opened[0].items()}
        return replace(self, spec=opened[1]).make(items)

    @property
    def is_of_library(self) -> bool:
        """Whether it is a container of which a library says more than pytree does."""
        return self.library is not AS_PYTREE_SAYS

    def containers(self, value: Any, keys: tuple[Any, ...] = ()) -> list[Container]:
        """Returns the containers of a batch, what they hold, and by which keys they are reached."""
        opened = None if self.kind is None or self.is_of_library else _open(value, self.library)
        if opened is None:
            return []
        found = [Container(self.path, keys, value, opened[0])]
        for key, child in zip(self.keys, self.children, strict=True):
            found += child.containers(opened[0][key], (*keys, key))
        return found

    def take(self, batch: Sequence[Any]) -> None:
        """Removes from a batch's mappings what ``loss_fn`` takes out of them."""
        for *keys, last in self.taken:
            mapping: Any = batch
            for key in keys:
                opened = _open(mapping, AS_PYTREE_SAYS)
                assert opened is not None
                mapping = opened[0][key]
            del mapping[last]

    def make(self, items: Mapping[Any, Any]) -> Any:
        assert self.kind is not None
        kind: Any = self.kind
        attributes = {name: value for name, (value, _) in self.own.items()}
        if self.spec is not None:
            fields = self.library.fields_of(kind) or items
            made: Any = pytree.tree_unflatten([items.get(field) for field in fields], self.spec)
            made = kind(made) if kind is torch.Size else made  # of which pytree makes a tuple
        elif issubclass(kind, Mapping):
            made = kind(items)
        else:  # its __init__ may compute
            made, attributes = kind.__new__(kind), {**items, **attributes}
        for name, item in attributes.items():
            object.__setattr__(made, name, item)
        return made


_AGAIN = "capture a step for this structure"


def _open(value: Any, library: Containers) -> tuple[Mapping[Any, Any], pytree.TreeSpec | None] | None:
    """Returns the items of a container by key, field or position, and how pytree makes it; None for a leaf."""
    opened = pytree.open_container(value)
    if opened is not None and library is not AS_PYTREE_SAYS:
        return library.held_items(value, opened[0]), opened[1]
    if isinstance(value, Mapping):
        return dict(value.items()), opened and opened[1]
    if opened is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, None
    return opened


def _accessor(value: Any, key: Any) -> str:
    if isinstance(value, Mapping):
        return f"[{key!r}]"
    return key if key[0] in ".[" else f".{key}"


def _difference(structure: BatchStructure, value: Any, items: Mapping[Any, Any]) -> str:
    missing = [_accessor(value, key) for key in structure.keys if key not in items]
    unknown = [_accessor(value, key) for key in items if key not in structure.keys]
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(unknown)} beside what the captured batch had"] if unknown else []
    return " and ".join(parts) or "has its keys in another order"


def _check_that_it_is_made(structure: BatchStructure, items: Mapping[Any, Any]) -> None:
    name = getattr(structure.kind, "__name__", "")
    refusal = CaptureError(
        f"{structure.path} is a {name}, which {name}(dict of its items) does not make again; pass a plain dict"
    )
    try:
        made = _open(structure.make(items), structure.library)
    except TypeError as error:
        raise refusal from error
    if made is None or [*made[0]] != [*items] or any(made[0][key] is not item for key, item in items.items()):
        raise refusal


def _own_attributes(structure: BatchStructure, value: Any, items: Mapping[Any, Any]) -> dict[str, tuple[Any, Key]]:
    """Returns a container's plain private attributes beside its items, with their keys; refuses public ones."""
    if structure.spec is not None and not issubclass(type(value), (Mapping, tuple)):
        return {}  # whoever registered it with pytree says what there is
    # UserDict has its items in `data`; BatchEncoding keeps its tokenizer's private ones.
    state = getattr(value, "__dict__", {}).items()
    own = {name: each for name, each in state if name not in items and name != "data" and each is not None}
    for name in own:
        if name[:1] != "_":
            raise BatchMismatchError(
                f"{structure.path}, a {type(value).__name__}, has the attribute {name!r} beside its items, which a "
                "captured step would not see; make it an item, or pass a plain dict"
            )
    return {name: (each, key) for name, each in own.items() if (key := key_of(each)).is_plain}
