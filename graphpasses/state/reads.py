"""What the user's code reads from outside while a step is traced: Python is asked while the code runs."""

from __future__ import annotations

import gc
import inspect
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphpasses._torch.module_hooks import hooks, is_kept_by_torch
from graphpasses.errors import CaptureError
from graphpasses.identity import has_other_items, walk_modules
from graphpasses.state.calls import calls_watched, stored_names
from graphpasses.state.carried import Place
from graphpasses.state.keys import CONTAINERS, MISSING, Key, attributes_of, key_of
from graphpasses.state.left_tensors import IN_CONTAINER, Left, read_before
from graphpasses.state.origin import is_torchs, is_users, is_users_code, users_modules
from graphpasses.state.outside import Outside, refuse_iterator
from graphpasses.state.patterns import COMPUTED, Known, pattern_of, walk
from graphpasses.state.slots import Difference, Owner, Slot, can_write, read

_FROM_ENVIRONMENT = type(os.environ).__getitem__.__code__
_OF_ENVIRONMENT = ("os", "collections.abc", "_collections_abc")


class Reads:
    """What the user's code reads while a step is traced, and what it was before it was read.

    Two questions are asked. Which functions run, is asked of Python (``sys.settrace``): each reads its globals, the
    variables of enclosing functions, and its defaults. Which attributes are read, is asked of the classes of the
    model's modules and of all objects found on the way, whose ``__getattribute__`` is another meanwhile.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._outside = Outside(self._watch_object)
        self._watched: dict[int, Owner] = {}  # by id of the object whose attributes are watched
        self._own: dict[int, frozenset[str]] = {}  # the attributes that it had
        self._found: Any = MISSING  # what was read last
        self._ignored: set[tuple[int, str]] = set()
        self._carried: dict[tuple[int, Any], Key] = {}
        self._inputs: set[tuple[int, Any]] = set()
        self._classes: set[type] = {nn.Module}
        self._codes: dict[int, tuple[CodeType, bool]] = {}  # that ran, and whether they are the user's
        self._nested: set[int] = set()  # the ids of code in these
        self._is_looking = False  # what is read meanwhile the user does not read
        self.drawn: str | None = None  # what is refused of code that drew random numbers of others than torch
        self.must_stay = True  # whether what is outside must be as it was once it was watched
        self._stack = ExitStack()
        for path, module in walk_modules(model):
            self._watch_object(module, self._outside.owner(module, path, of_model=True))

    @property
    def attributes(self) -> list[Owner]:
        """The modules of the model and the objects that these hold of which attributes were read."""
        return self._outside.read(of_model=True)

    @property
    def names(self) -> list[Owner]:
        """All else of which something was read: what functions have names for."""
        return self._outside.read(of_model=False)

    def place(self, module: nn.Module, name: str) -> Place | None:
        """Returns where an attribute of a module of the model stands, if it was read before it was set."""
        slot = (owner := self._outside.owner(module)).slots.get(name)
        return None if slot is None else Place(slot.path, owner, slot)

    def count(self, places: Iterable[Place]) -> None:
        """Notes what stands in places, which is no constant of the step."""
        own = (place for place in places if place.is_of_module and id(place.owner.value) in self._outside.of_model)
        self._ignored |= {(id(place.owner.value), place.slot.name) for place in own}
        for owner, name in ((place.owner.value, place.slot.name) for place in places):
            self._carried[id(owner), name] = key_of(read(owner, name))
        self._inputs = {(id(place.owner.value), place.slot.name) for place in places if not place.keys}

    def is_input(self, place: Place) -> bool:
        """Whether the step reads all that stands there as an input."""
        return (id(place.owner.value), place.slot.name) in self._inputs

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what the block reads and sets, and puts it back, but for the model's own attributes; refuses
        changes.
        """
        try:
            with self._stack:
                self._begin()
                yield
            self.drawn = self._outside.drawn()
            self._outside.finish()
            self._find_caches()
            if self.must_stay and (refusal := self.refusal()):
                raise CaptureError(refusal)
        finally:
            own = (owner for owner in self.attributes if not isinstance(owner.value, nn.Module))
            for owner in (*self.names, *own):
                owner.restore()

    def refusal(self) -> str | None:
        """Says what the code has changed that is outside, but for what the step leaves."""
        found = ((owner, owner.difference(strict=True)) for owner in self.names)
        return next((_refusal(owner, difference) for owner, difference in found if difference is not None), None)

    def left(self, own: Known) -> tuple[Left, dict[str, Any]]:
        """Returns what the step leaves in what is no module of the model, and in attributes that forward read before,
        and what it computed of that, by name; ``own`` are the model's tensors.
        """
        left, computed, seen = Left(), dict[str, Any](), set[int]()
        self._outside.add_new_names()
        every = [(owner, slot) for owner in (*self.names, *self.attributes) for slot in owner.slots.values()]
        every.sort(key=lambda pair: str(pair[1].name)[:2] == "__")  # an argument's name tells more than __defaults__
        names = Counter(id(container) for _, slot in every for container, _ in slot.copies)
        shared = {each for each, num_names in names.items() if num_names > 1}
        for owner, slot in every:
            value, in_model = read(owner.value, slot.name), id(owner.value) in self._outside.of_model
            is_module, is_same = in_model and isinstance(owner.value, nn.Module), value is slot.value
            is_known = is_same or isinstance(value, (*COMPUTED, *CONTAINERS))
            # What a module has else is looked at elsewhere.
            if value is MISSING or (is_module and (key_of(value).is_plain or not is_known)):
                continue
            tensors = {id(each) for each in walk(value).values() if isinstance(each, torch.Tensor)}
            if is_module and not is_same and tensors and tensors <= own.ids:
                continue  # a new list of the model's weights
            difference, carried = slot.difference(value, strict=True), self._carried.get((id(owner.value), slot.name))
            if difference is None and slot.left is MISSING and carried is None:
                continue
            path = slot.path if is_module else f"{slot.path} (outside)"
            while path in left.places:  # closures of one ``def`` have the same names
                path += "'"
            refusal = "" if difference is None else _refusal(owner, difference)
            if is_module:
                refusal = IN_CONTAINER.format(path) if isinstance(slot.value, CONTAINERS) else read_before(path)
            found = pattern_of(path, value, slot.copies, own, shared)
            if found is not None and (_is_of_class(owner.value, slot.name) or carried == key_of(value)):
                left.also.append((slot, found[0]))
                continue
            if found is not None and (is_same or can_write(owner.value, slot.name)):
                containers = {id(each) for each, items in slot.copies if has_other_items(each, items)}
                if is_same and containers <= seen:  # under another name
                    left.also.append((slot, found[0]))
                    continue
                seen |= containers
                left.places[path] = Place(path, owner, slot)
                left.values[path], left.refusals[path] = found[0], refusal
                computed |= found[1]
            elif in_model and difference is not None:
                raise CaptureError(refusal)
        return left, computed

    def _find_caches(self) -> None:
        """Notes which names reach what the code that ran gives items."""
        stored = {name for code, _ in self._codes.values() for name in stored_names(code)}
        for slot in (slot for owner in (*self.attributes, *self.names) for slot in owner.slots.values()):
            slot.is_cache = not stored.isdisjoint(re.findall(r"\w+", slot.path))

    def running(self) -> AbstractContextManager[None]:
        """Asks which functions run, within :meth:`watched`: where a step runs, and not what traces it."""
        return calls_watched(self._on_call)

    def _begin(self) -> None:
        self._outside.note_generator("Python's random", random.random.__self__)  # type: ignore[attr-defined]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._outside.note_generator("numpy.random", numpy.random.rand.__self__)
        self._watch(nn.Module)
        self._watch(module_kind := type("module", (ModuleType,), {}))
        for library in users_modules():
            owner = self._outside.owner(vars(library), library.__name__.rpartition(".")[2])
            self._watch_object(library, owner)
            self._stack.callback(setattr, library, "__class__", ModuleType)
            library.__class__ = module_kind
        open_ = self._outside.open
        for module in self._model.modules():
            open_(type(module).__name__, type(module))
            for function in (*hooks(module), vars(module).get("forward")):
                open_(getattr(function, "__name__", "forward"), function)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            open_(name, tensor)
        open_(getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__), self._loss_fn)

    def look_again(self, places: Collection[Place]) -> None:
        """Takes what now stands in slots that had a traced number, of these places, for what the step found."""
        holders = {id(place.holder) for place in places}
        holders |= {id(place.owner.value) for place in places}
        for owner in (*self.attributes, *self.names) if places else ():
            for slot in owner.slots.values():
                if id(owner.value) in holders or any(id(container) in holders for container, _ in slot.copies):
                    slot.look_again(owner.value)

    def changed(self) -> dict[Slot, tuple[Place, Difference, Key]]:
        """Returns the attributes that are others than when they were first read, but for tensors and functions: where
        they stand, how they differ, and their keys now.
        """
        found: dict[Slot, tuple[Place, Difference, Key]] = {}
        for owner in self.attributes:
            for slot in owner.slots.values():
                difference = slot.difference(value := read(owner.value, slot.name), strict=True)
                if difference is not None and difference.now.kind is not object:
                    found[slot] = Place(slot.path, owner, slot), difference, key_of(value)
        return found

    # ---- functions that run ----------------------------------------------------------------------------

    def _on_call(self, frame: FrameType) -> None:
        code, known = frame.f_code, self._outside.functions
        if id(code) not in self._codes:
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            self._codes[id(code)] = code, is_function and is_users_code(code, frame.f_globals)
            if self._codes[id(code)][1]:
                self._nested |= {id(each) for each in code.co_consts if isinstance(each, CodeType)}
                self._outside.read_code(code, frame.f_globals)
        if code is _FROM_ENVIRONMENT:
            self._read_environment(frame)
        if not self._codes[id(code)][1]:
            return
        this = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind = this if isinstance(this, type) else type(this)
        if is_users(kind):
            self._outside.open(kind.__name__, kind)
        if id(code) not in known and id(code) not in self._nested:
            has_values = code.co_argcount or code.co_kwonlyargcount or code.co_freevars
            found = gc.get_referrers(code) if has_values else ()
            known[id(code)] = [each for each in found if isinstance(each, FunctionType)]
        for function in known.get(id(code), ()):
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            # Closures of one ``def`` share their code.
            if all(read(cell, name) is frame.f_locals.get(name, MISSING) for name, cell in cells):
                self._outside.read_function(function)

    def _read_environment(self, frame: FrameType) -> None:
        reader = frame.f_back
        while reader is not None and reader.f_globals.get("__name__") in _OF_ENVIRONMENT:
            reader = reader.f_back
        if reader is not None and is_users_code(reader.f_code, reader.f_globals):
            name = frame.f_locals["key"]
            self._outside.slot(os.environ, name, f"os.environ[{name!r}]")

    # ---- attributes that are read ------------------------------------------------------------------------

    def _watch_object(self, value: Any, owner: Owner) -> None:
        self._watched[id(value)] = owner
        self._own[id(value)] = frozenset(attributes_of(value) or ())
        if type(value) not in self._classes and not isinstance(value, (nn.Module, ModuleType)):
            self._watch(type(value))

    def _watch(self, kind: type) -> None:
        self._classes.add(kind)
        reads: Any = kind.__getattribute__
        sets: Any = kind.__setattr__

        def get(this: Any, name: str) -> Any:
            if self._is_looking or not self._is_seen(this, name):
                return reads(this, name)
            if name == "__dict__":
                state = reads(this, name)
                for each, value in [*state.items()]:
                    self._on_read(this, each, value)
                self._on_names(this)
                return state
            self._found = MISSING
            try:
                value = _read(reads, this, name)
            except AttributeError:
                self._on_read(this, name, MISSING)
                raise
            if value is not self._found:  # by a wrapper's `__getattr__`, in another object, which was asked for it
                self._on_read(this, name, value)
            self._found = value
            return value

        def set_(this: Any, name: str, value: Any) -> None:
            if id(this) in self._watched and name not in self._watched[id(this)].slots:
                if id(this) in self._outside.of_model and isinstance(this, nn.Module):
                    self._ignored.add((id(this), name))
                elif not isinstance(inspect.getattr_static(type(this), name, None), property):
                    getattr(this, name, None)
            sets(this, name, value)

        self._stack.enter_context(mock.patch.object(kind, "__getattribute__", get))
        self._stack.enter_context(mock.patch.object(kind, "__setattr__", set_))

    def _is_seen(self, this: Any, name: str) -> bool:
        """Whether a name is watched that is read now: ``__dict__`` is by code that is not the object's own."""
        if id(this) not in self._watched or (is_kept_by_torch(this, name) and id(this) in self._outside.of_model):
            return False
        if name != "__dict__":
            return name[:2] != "__"
        reader = inspect.currentframe()
        reader = reader and reader.f_back and reader.f_back.f_back
        if reader is None or (isinstance(this, nn.Module) and not is_users_code(reader.f_code, reader.f_globals)):
            return False
        first = reader.f_code.co_varnames[:1]
        return not first or reader.f_locals.get(first[0]) is not this

    def _on_read(self, this: Any, name: str, value: Any) -> None:
        owner, of_model = self._watched[id(this)], id(this) in self._outside.of_model
        if name in owner.slots or (id(this), name) in self._ignored:
            return
        self._is_looking = True
        try:
            path = f"{owner.path}.{name}".lstrip(".")
            what = "forward reads attribute" if of_model else "the code of the step reads"
            refuse_iterator(f"{what} {path!r}", value)
            if not self._counts(this, name, value):
                self._ignored.add((id(this), name))
                return
            static = inspect.getattr_static(type(this), name, None)
            if isinstance(static, cached_property) and name not in self._own[id(this)]:
                value = MISSING  # it is made now
            slot = owner.add(name, value=value)
            slot.opened = self._outside.open(slot.path, value, of_model=of_model)
        finally:
            self._is_looking = False

    def _on_names(self, this: Any) -> None:
        """Notes that code read all attributes that an object has, by ``vars``: new ones count, too."""
        if (id(this), "__dict__") not in self._ignored and not is_torchs(type(this)):
            self._ignored.add((id(this), "__dict__"))
            of_model = id(this) in self._outside.of_model
            self._outside.read_names(self._watched[id(this)].path, this, of_model=of_model)

    def _counts(self, this: Any, name: str, value: Any) -> bool:
        """Whether a step may build an attribute in: no tensor or module of the model's, nor what code computes."""
        of_model = id(this) in self._outside.of_model
        if isinstance(this, nn.Module):
            state = attributes_of(this) or {}
            kinds = ("_parameters", "_buffers", "_modules")
            if kind := next((each for each in kinds if name in state.get(each, ())), None):
                # Who puts others there for a while (``functional_call``) has read what there was.
                return not of_model and kind not in self._watched[id(this)].slots
        static = inspect.getattr_static(type(this), name, None)
        if not isinstance(this, nn.Module) and is_torchs(type(this)):  # torch's objects keep caches and counts
            return key_of(value).is_plain and not isinstance(static, (property, cached_property))
        is_stored = isinstance(static, (MemberDescriptorType, cached_property)) or not hasattr(static, "__get__")
        if name in self._own[id(this)] or is_stored:
            return True
        if callable(static) or isinstance(static, (property, classmethod)):
            is_own = name == "forward" and not of_model
            return isinstance(static, FunctionType) and (is_own or is_users(static))
        return key_of(value).is_plain


def _is_of_class(value: Any, name: Any) -> bool:
    """Whether an object has what its class has under a name, which is no descriptor."""
    state = {} if isinstance(value, type) else attributes_of(value) or {}
    if not state or name in state:
        return False
    static = inspect.getattr_static(type(value), name, MISSING)
    return static is not MISSING and not hasattr(type(static), "__get__")


def _refusal(owner: Owner, found: Difference) -> str:
    is_module = isinstance(owner.value, nn.Module)
    instead = (
        f"name its module, a {type(owner.value).__name__}, in capture_train_step(..., others=(...,))"
        if is_module
        else "keep it in a buffer, or an attribute, of the model"
    )
    return (
        f"{found.text()}: the code of the step changes it, and a captured step would not. Compute it from the loss "
        f"that the step returns, or {instead}; what a hook keeps, take out again before loss_fn returns "
        "(kept.pop(name), kept.clear()); if it is set at the first call only, run loss_fn once before the capture"
    )


def _read(reads: Any, this: Any, name: str) -> Any:
    """Reads an attribute, also what only ``__getattr__`` knows."""
    try:
        return reads(this, name)
    except AttributeError:
        if (missing := getattr(type(this), "__getattr__", None)) is None:
            raise
        return missing(this, name)
