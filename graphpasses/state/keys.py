"""What tells one Python value from another: what it is, not ``==``."""

from __future__ import annotations

import builtins
import enum
import functools
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from random import Random, SystemRandom
from threading import local
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.types import py_sym_types

from graphpasses._torch.group_ranks import mesh_group_names
from graphpasses._torch.sparse_fakes import num_elements
from graphpasses.identity import MAX_ITEMS, same_bits

PLAIN = (
    enum.Enum, bool, int, float, complex, str, bytes, bytearray, type(None), slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# All globals hold it (`vars(module)`), and a trace puts functions of its own there.
_BUILTINS = (id(vars(builtins)),)
_MAX_DEPTH = 100
MISSING: Any = object()
CachedFunction = type(functools.lru_cache(lambda: None))


class Key(NamedTuple):
    """The key of a value."""

    kind: type  # its class; ``object`` for what is told by identity
    # The text of a plain value; the keys of a container's items, of a dict in pairs; or the ids of an object and of
    # the tensors that it holds.
    items: Any
    name: str = ""  # how a message calls an object

    def __str__(self) -> str:
        if self.name or isinstance(self.items, str):
            return self.name or str(self.items)
        if not self.is_plain:
            return f"a {self.kind.__name__} of {len(self.items)}"
        if issubclass(self.kind, dict):
            return f"{{{', '.join(f'{key}: {item}' for key, item in self.items)}}}"
        texts = [*map(str, self.items)]
        if issubclass(self.kind, (set, frozenset)):
            return f"{{{', '.join(sorted(texts))}}}"
        return f"({', '.join(texts)})" if issubclass(self.kind, tuple) else f"[{', '.join(texts)}]"

    @property
    def is_plain(self) -> bool:
        """Whether nothing in the value is told by identity."""
        if self.kind is object:
            return False
        if isinstance(self.items, str):
            return True
        keys = (key for pair in self.items for key in pair) if issubclass(self.kind, dict) else self.items
        return all(key.is_plain for key in keys)


ABSENT = Key(type(None), "absent")


@dataclass(frozen=True)
class FunctionStandIn:
    """What stands in a function's place while a step is traced."""

    function: Callable[..., Any]
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def key_of(value: Any) -> Key:
    """Returns the key of a value.

    Plain values are told by class and text: ``1``, ``1.0`` and ``True`` differ, and so do ``0.0`` and ``-0.0``;
    ``nan`` is one value. Containers are told by their items, arrays by their bytes, all else by identity; of torch's
    own objects, as a ``GradScaler``, the tensors that they hold count, too. :data:`MISSING` is absent.
    """
    return ABSENT if value is MISSING else _key(value, [MAX_ITEMS], _BUILTINS)


def _key(value: Any, left: list[int], inside: tuple[int, ...]) -> Key:
    own: Any = type(value)
    kind = _plain_kind(own)
    if kind is not None:
        text = str(value) if kind is torch.device else kind.__repr__(value)
        return Key(own, f"np.{own.__name__}({text})" if is_array(value) else text)

    def part(each: Any) -> Key:
        return _key(each, left, inside)

    if isinstance(value, MethodType):  # a new object at each read
        return Key(object, (id(value.__func__), id(value.__self__)), _name(value))
    if isinstance(value, ReferenceType):
        # An RNN notes with which tensors it ran, which may be gone; those that a step reads are its inputs.
        target = value()
        is_noted = target is None or isinstance(target, torch.Tensor)
        return Key(own, "a weak reference" if is_noted else (part(target),))
    if isinstance(value, MappingProxyType):
        return Key(own, (part(dict(value)),))
    if is_array(value):
        if value.dtype.hasobject:
            return Key(own, (part(value.ravel().tolist()),))
        contents = sha256(value.tobytes()).hexdigest()[:16]
        return Key(own, f"an array {value.dtype}{[*value.shape]} {contents}")
    if has_memory(value):
        with memoryview(value) as memory:
            data = memory.tobytes()
        return Key(own, repr(data) if len(data) < 100 else f"{len(data)} bytes {sha256(data).hexdigest()[:16]}")
    if isinstance(value, CONTAINERS) and id(value) not in inside and len(inside) < _MAX_DEPTH:
        base = container_of(own)
        length = base.__len__(value)
        left[0] -= length
        if left[0] >= 0:
            inside = (*inside, id(value))
            if issubclass(base, dict):
                return Key(own, tuple((part(k), part(v)) for k, v in [*base.items(value)]))
            keys = map(part, [*base.__iter__(value)])  # read at once: another thread may go on to change it
            return Key(own, frozenset(keys) if issubclass(base, (set, frozenset)) else tuple(keys))
        return Key(object, (id(value), length), f"a {own.__name__} of {length}")
    held = (id(each) for each in (torch_state(value) or {}).values() if isinstance(each, torch.Tensor))
    return Key(object, (id(value), *held), _name(value))


@functools.cache
def _plain_kind(kind: type) -> Any:
    """Returns the plain class that a class is, whose text counts: a subclass may say anything of itself."""
    return next((each for each in PLAIN if issubclass(kind, each)), None)


@functools.cache
def container_of(kind: Any) -> Any:
    """Returns Python's own class of a container's, by whose methods it has its items: a subclass may have others."""
    return next(each for each in (OrderedDict, *CONTAINERS) if issubclass(kind, each))


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns what a container holds, by key or place; nothing of one that is told by identity, as it holds more."""
    kind: Any = type(value)
    base = container_of(kind)
    if base.__len__(value) > MAX_ITEMS or id(value) in _BUILTINS:
        return []
    return [*(base.items(value) if issubclass(base, dict) else enumerate(base.__iter__(value)))]


def _name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, py_sym_types):  # of a step that is traced
        return "a number of a tensor"
    name = getattr(value, "__qualname__", None) if isinstance(value, type) or callable(value) else None
    return name if isinstance(name, str) else f"a {type(value).__name__}"


def is_array(value: Any) -> bool:
    """Whether a value is an array or a number of NumPy's, which need not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def is_float(value: Any) -> bool:
    """Whether a value is a float of Python's, or of NumPy's, with the same bits."""
    return type(value) is float or (isinstance(value, float) and is_array(value))


def is_carried_number(value: Any) -> bool:
    """Whether a value is a number that a tensor can carry as it is."""
    return is_float(value) or (type(value) is int and -(2**63) <= value < 2**63)


def random_state(value: Any) -> bytes | None:
    """Returns the state of a generator of Python's, or NumPy's random numbers; None of all else."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    if not isinstance(value, (Random, *of_numpy)) or isinstance(value, SystemRandom):
        return None
    return pickle.dumps(value.__reduce__()[1:])


_WITHOUT_MEMORY: set[type] = set()


def has_memory(value: Any) -> bool:
    """Whether Python can read an object's memory, as of those of ``array``, ``ctypes`` and ``mmap``."""
    if type(value) in _WITHOUT_MEMORY:
        return False
    try:
        memoryview(value).release()
    except TypeError:
        _WITHOUT_MEMORY.add(type(value))
        return False
    except (ValueError, BufferError):  # it is closed
        return False
    return True


def changes_in_place(value: Any) -> bool:
    """Whether a value may become another and stay the same object."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(changes_in_place, container_of(type(value)).__iter__(value)))
    if isinstance(value, (*CONTAINERS, MethodType, MappingProxyType)) or is_array(value):
        return True
    return torch_state(value) is not None or (has_memory(value) and not isinstance(value, bytes))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the ``__dict__`` of an object, whatever its class says of it; None if it has none."""
    reads: Any = local.__getattribute__ if isinstance(value, local) else object.__getattribute__
    try:
        found: dict[str, Any] = reads(value, "__dict__")
    except AttributeError:
        return None
    return found


def torch_state(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object of torch's own, as of a ``GradScaler``; None of others."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torch" or isinstance(value, (torch.Tensor, nn.Module, type)):
        return None
    return getattr(value, "__dict__", None)


@dataclass(frozen=True)
class TensorFacts:
    """What a graph has built in of a tensor that it reads."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]  # by which autograd chooses its formula (that of mm), and operators what they return
    placements: tuple[Placement, ...] | None
    groups: tuple[str, ...]  # of a DTensor's mesh, by the names that collectives have for them
    mesh: DeviceMesh | None = field(compare=False)
    num_elements: int | None  # of a sparse one

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        placements, mesh = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (None, None)
        groups = () if mesh is None else mesh_group_names(mesh)
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(tensor.shape, tensor.dtype, tensor.device, strides, placements, groups, mesh, num_elements(tensor))

    def in_groups(self, names: Mapping[str, str]) -> TensorFacts:
        """Returns it of a rank that has other groups."""
        return replace(self, groups=tuple(names.get(name, name) for name in self.groups))

    def told_from(self, other: TensorFacts) -> tuple[str, str]:
        """Returns as much of this, and of another, as tells one from the other."""
        pairs = zip(self.texts(), other.texts(), strict=True)
        return next((mine, its) for mine, its in pairs if mine != its)

    def texts(self) -> tuple[str, ...]:
        """Returns what messages say of it, in ever more detail."""
        kind = f"{self.dtype}{[*self.shape]} on {self.device}"
        kind += "" if self.num_elements is None else f", {self.num_elements} elements"
        strided = f"{kind}, strides {[*self.strides]}"
        placed = f"{strided}, {self.placements} of {self.mesh}"
        return kind, strided, placed, f"{placed}, process groups {self.groups}"

    def __str__(self) -> str:
        placed = f", {self.placements} of {self.mesh}" if self.placements else ""
        stored = f"strides {list(self.strides)}" if self.num_elements is None else f"{self.num_elements} elements"
        return f"{list(self.shape)} {self.dtype} on {self.device}, {stored}{placed}"


def same_tensors(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns for each value the position of the first that is the same tensor; its own where none before it is."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(value), index) if isinstance(value, torch.Tensor) else index
        for index, value in enumerate(values)
    )


def narrowed(path: str, before: Key, now: Key, *, new_objects: bool) -> tuple[str, Key, Key] | None:
    """Returns the first part by which two values differ, with its path; of a dict's new items plain ones, or all."""
    if before == now:
        return None
    is_sequence = before.kind is now.kind is not object and isinstance(before.items, tuple)
    pairs: dict[Any, tuple[Key, Key]]
    if before.kind is now.kind and issubclass(before.kind, dict):
        old, new = dict(before.items), dict(now.items)
        if not new_objects:
            new = {key: item for key, item in new.items() if key in old or item.is_plain}
        pairs = {key: (old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new}}
        whole = None if [*old] == [*new] else (path, before, now)
    elif is_sequence and len(before.items) == len(now.items):
        pairs, whole = dict(enumerate(zip(before.items, now.items, strict=True))), None
    else:
        return path, before, now
    parts = (narrowed(f"{path}[{key}]", *pair, new_objects=new_objects) for key, pair in pairs.items())
    return next((part for part in parts if part is not None), whole)


Pairs = dict[tuple[int, int], Any]
"""Pairs of objects that are alike, by ``id``; with them the objects, so that no others have their ids."""


def are_alike(value: Any, other: Any, pairs: Pairs) -> bool:
    """Whether models built alike may hold these: the same bits, functions of one code, objects of one class, and what
    these hold likewise. ``pairs`` are the modules of the models, and get what was compared.
    """
    if value is other or (id(value), id(other)) in pairs:
        return True
    pairs[id(value), id(other)] = value, other
    key = key_of(value)
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(value, other)
    if key == key_of(other):
        return True
    if type(value) is not type(other) or key.is_plain or isinstance(value, (type, nn.Module)):
        return False
    if (parts := _parts_of(value)) is None:
        return bool(value == other)
    others = _parts_of(other) or ()
    return len(parts) == len(others) and all(
        are_alike(part, its, pairs) for part, its in zip(parts, others, strict=True)
    )


def _parts_of(value: Any) -> list[Any] | None:
    """Returns what an object holds, in order; None of one that only C code knows."""
    if isinstance(value, FunctionType):
        cells = [read_cell(cell) for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (dict, list, tuple)):
        base = container_of(type(value))
        return [*base.keys(value), *base.values(value)] if issubclass(base, dict) else [*base.__iter__(value)]
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (Sequence, deque)):
        return [*value]
    state, own = object.__getstate__(value), attributes_of(value)
    slots = state[1] if isinstance(state, tuple) else {}
    return [*slots.values(), *(own or {}), *(own or {}).values()] if slots or own is not None else None


def read_cell(cell: CellType) -> Any:
    """Returns what the cell of a closure has; :data:`MISSING` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
