"""What a step leaves in a model: buffers that it replaces, attributes that it sets; and how all of it is put back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.types import py_sym_types

from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_parameters import named_sharded_parameters
from graphpasses._torch.module_hooks import hook_dicts, is_kept_by_torch
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.storage import memories
from graphpasses.errors import CaptureError
from graphpasses.identity import attributes_restored, find_state, put_back
from graphpasses.state.carried import CarriedError, Place, is_number, places_in
from graphpasses.state.changes import Found, changing
from graphpasses.state.draws import draws_undone
from graphpasses.state.keys import CONTAINERS, MISSING, key_of
from graphpasses.state.model import is_trained
from graphpasses.state.patterns import COMPUTED, Known, filled, misfit, pattern_of, stand_ins, walk, was_read
from graphpasses.state.slots import FIRST_CALL, Slot, read, write


def values_of(model: nn.Module) -> dict[str, Any]:
    """Returns what :class:`LeftTensors` looks at: parameters, but for FSDP2's, which come and go, buffers, and
    attributes of modules, by FQN.
    """
    attributes = {
        fqn: value
        for fqn, module, value in _attributes_of(model)
        # DistributedDataParallel keeps its own accounts.
        if not isinstance(value, nn.Parameter) and not isinstance(module, nn.parallel.DistributedDataParallel)
    }
    return {**_parameters_of(model), **dict(model.named_buffers()), **attributes}


def read_before(fqn: str) -> str:
    """Says why an attribute is refused that forward reads and then sets."""
    return (
        f"forward reads the attribute {fqn!r} and keeps a tensor, or its .item(), in it, and a captured step would "
        "read the old one at each call. If it is kept at the first call only, run loss_fn once before the capture; "
        f"else make it a buffer, e.g. register_buffer({fqn.rpartition('.')[2]!r}, ..., persistent=False), which a "
        "step reads anew"
    )


def modes_of(values: Mapping[str, Any]) -> list[str]:
    """Returns the FQNs of the modules whose modes are among values of attributes."""
    paths = (fqn.rpartition(".") for fqn in values)
    return [owner for owner, _, name in paths if name == "training"]


@dataclass(frozen=True)
class Left:
    """What a step leaves beside tensors in attributes of a model's modules.

    Args:
        values: patterns, by FQN of an attribute, or by the path of a place.
        places: by path, names of what is no module of the model, and containers that stay the same.
        refusals: why each is refused where the next step reads it, or leaves something else.
        also: other names of what these have, with patterns.
        is_first: whether the next call finds something else than this step is for.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    also: list[tuple[Slot, Any]] = field(default_factory=list)
    is_first: bool = False

    def leave(self, model: nn.Module, computed: Mapping[str, Any], *, is_old: bool = False) -> None:
        """Gives modules of a model, and the places, what a step computed, and Python values."""
        alone = dict(computed)
        places = {path: self._place(model, path) for path in self.values}
        every = ((path, self.values[path], read(*place)) for path, place in places.items())
        made = {path: filled(pattern, now, alone, is_old=is_old) for path, pattern, now in every}
        for path, value in (made | alone).items():
            owner, name = places[path] if path in places else self._place(model, path)
            before = read(owner, name)
            if isinstance(before, nn.Parameter) and path not in self.places:
                value = nn.Parameter(value, requires_grad=before.requires_grad)
            if before is not value:
                write(owner, name, value)

    def is_any(self, computed: Mapping[str, Any]) -> bool:
        """Whether something is left, after which the step goes on."""
        return bool(computed or self.values) and not self.is_first

    def _place(self, model: nn.Module, path: str) -> tuple[Any, str]:
        """Returns what has a name, and the name."""
        if path in self.places:
            return self.places[path].owner.value, self.places[path].slot.name
        fqn, _, name = path.rpartition(".")
        module = model.get_submodule(fqn)
        return next((each for each in (module._parameters, module._buffers) if name in each), vars(module)), name

    def for_model(self, *others: Any) -> Left:
        """Returns the same of a step of another model, which :func:`places_in` is given."""
        places = places_in(self.places.values(), *others)
        return replace(self, places=dict(zip(self.places, places, strict=True)))

    def mark(self) -> None:
        """Lets the places have what a step leaves there."""
        for slot, pattern in self._marked():
            slot.left = pattern

    def seen_again(self, later: Left) -> None:
        """Lets the places have what a later call leaves, which may set a list to which this one seemed to append."""
        for path in self.places.keys() & later.values.keys():
            if misfit(later.values[path], self.values[path]) is None:
                self.values[path] = later.values[path]
        self.mark()

    def for_first_calls(self, is_input: Callable[[Place], bool]) -> Left:
        """Lets the places have what they had, and nothing else, but for those that are inputs of the step."""
        inputs = {id(place.slot) for place in self.places.values() if is_input(place)}
        for slot, _ in self._marked():
            if id(slot) not in inputs:
                slot.left, slot.is_cache = MISSING, False
        return replace(self, is_first=True)

    def _marked(self) -> list[tuple[Slot, Any]]:
        return [*((place.slot, self.values[path]) for path, place in self.places.items()), *self.also]

    def give_stand_ins(self, model: nn.Module) -> Callable[[], set[str]]:
        """Leaves, for what a step computes, what raises when it is read; returns what tells the names of such."""
        made = {name: each for path in self.places for name, each in stand_ins(self.values[path]).items()}
        replace(self, values={path: self.values[path] for path in self.places}).leave(model, made, is_old=True)
        return lambda: {name for name, each in made.items() if was_read(each)}

    def refusal_of(self, names: Collection[str]) -> str | None:
        """Says why the first place is refused of which the next step reads what this computes, by these names."""
        places = (path for path in self.places if not stand_ins(self.values[path]).keys().isdisjoint(names))
        return next(map(self.refusals.__getitem__, places), None)

    def difference(self, other: Left, *, is_same: bool) -> str | None:
        """Says why the first place is refused that another step gives something else; any, unless it ``is_same``."""
        pairs = ((path, *(each.values.get(path, MISSING) for each in (self, other))) for path in self.places)
        different = (path for path, one, another in pairs if not is_same or misfit(another, one))
        return next(map(self.refusals.__getitem__, different), None)

    def changing(self, later: Left | None) -> list[Found]:
        """Returns where the step leaves what it computes, or changes a number, as ``later`` shows, which goes on from
        there.
        """
        then = {} if later is None else later.values
        every = ((place, self.values[path], then.get(path, MISSING)) for path, place in self.places.items())
        return [found for place, pattern, value in every for found in changing(place, pattern, value)]


def with_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of a model that may have a gradient, whatever a ``parameters`` of its own class yields."""
    return [*nn.Module.parameters(model), *(buffer for buffer in model.buffers() if buffer.is_leaf)]


@contextmanager
def live_state_restored(model: nn.Module) -> Iterator[None]:
    """Restores parameters, buffers, attributes and gradients of a model, and the state of random number generators.

    Tensors are put back, also their memory where another was assigned to their ``data``, not what was written into
    them; of attributes that are lists, dicts and sets the items, too.
    """
    gradients = [(parameter, parameter.grad) for parameter in with_gradients(model)]
    hooks = {id(each): dict(each) for parameter, _ in gradients for each in hook_dicts(parameter)}
    assigned = Assigned(model)
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    try:
        with attributes_restored(model.modules()), torch.random.fork_rng(devices), draws_undone():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for now in (each for parameter, _ in gradients for each in hook_dicts(parameter)):
            put_back(now, hooks.get(id(now), {}))
        for tensor, before in assigned.changed().values():
            tensor.data = before


class Assigned:
    """What was assigned to the ``data`` of a model's tensors since this was made; of FSDP2's, which keeps its own,
    nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        named = () if fsdp_groups(model) else (*model.named_parameters(), *model.named_buffers())
        self._before = {fqn: (tensor, tensor.data) for fqn, tensor in named if not is_tensor_subclass(tensor)}

    def changed(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Returns, by FQN, the tensors that lie in other memory than before, and what lies in that."""
        return {fqn: pair for fqn, pair in self._before.items() if memories(pair[0]) != memories(pair[1])}


@contextmanager
def tensors_kept(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Raises if the block, a step, gives a tensor of the model or of the batch an attribute, or another shape in
    place.
    """
    leaves = ((name, each) for name, each in batch.items() if isinstance(each, torch.Tensor))
    named = [*values_of(model).items(), *model.named_parameters(), *leaves]
    found = [(name, each, _shape(each), _attributes(each)) for name, each in named if isinstance(each, torch.Tensor)]
    yield
    for name, tensor, before, attributes in found:
        for attribute, value in _attributes(tensor).items():
            if value is not attributes.get(attribute, named):
                raise CaptureError(
                    f"loss_fn sets an attribute {attribute!r} of {name!r}, and a captured step would not. Set one of "
                    f"a module{FIRST_CALL}"
                )
        if str(now := _shape(tensor)) != str(before):  # a size that varies may be known by now
            raise CaptureError(
                f"loss_fn gives {name!r} another shape in place ({before}, then {now}: sizes, strides, dtype), as "
                "unsqueeze_, resize_, a cast that is assigned to .data, and observers of torch.ao do, and a captured "
                f"step would not. Compute with another tensor, e.g. x.unsqueeze(1){FIRST_CALL}"
            )


class LeftTensors:
    """What a step leaves in the modules of a model: the difference between now and when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = values_of(model)
        # A size of an earlier trace is another one.
        self._keys = {fqn: key_of(value) for fqn, value in self._before.items() if not _varies(value)}
        # Kept, so that no others have the ids of what containers hold.
        self._items = [walk(value) for value in self._before.values() if isinstance(value, CONTAINERS)]

    def changed(self) -> dict[str, Any]:
        """Returns what is another value than before, by FQN."""
        return self._changed(values_of(self._model))

    def _changed(self, now: Mapping[str, Any]) -> dict[str, Any]:
        return {fqn: each for fqn, each in now.items() if key_of(each) != self._keys.get(fqn)}

    def trained(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers that are others than before, by FQN, and may get gradients."""
        own = _parameters_of(self._model) | dict(self._model.named_buffers())
        return {fqn: each for fqn, each in self.changed().items() if fqn in own and is_trained(each)}

    def find(self, read_at: Callable[[nn.Module, str], Place | None]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what the step computed and left, by FQN, and patterns of the rest; raises where a captured step
        could not leave them. What it put into containers that were there :class:`Reads` knows.

        ``read_at`` says where an attribute of a module stands, if forward read it before it set it.
        """
        changed = self._changed(now := values_of(self._model))
        left, values = dict[str, Any](), dict[str, Any]()
        for fqn in {fqn for fqn in self._before if find_state(self._model, fqn) is None} - now.keys():
            raise CaptureError(f"forward deletes attribute {fqn!r}, and a captured step would not{FIRST_CALL}")
        unchanged = (each for fqn, each in now.items() if isinstance(each, torch.Tensor) and fqn not in changed)
        own = Known([*unchanged, *nn.Module.parameters(self._model)])
        for fqn, value in changed.items():
            owner, _, name = fqn.rpartition(".")
            module, before, key = self._model.get_submodule(owner), self._before.get(fqn, MISSING), key_of(value)
            is_state, is_same = name in module._buffers or name in module._parameters, value is before
            place = None if is_state else read_at(module, name)
            is_looked_at = place is not None and not key.is_plain and isinstance(value, (*COMPUTED, *CONTAINERS))
            if is_looked_at and not (isinstance(value, py_sym_types) and is_number(before)):
                continue  # what `Reads` knows
            _refuse_subclass(fqn, value)
            if is_state and _kind(self._before[fqn]) != _kind(value):
                what = "buffer" if name in module._buffers else "parameter"
                raise CaptureError(
                    f"forward replaces {what} {fqn!r}, {_kind(self._before[fqn])}, by {_kind(value)}, and the next "
                    f"call would read another kind of tensor than was captured{FIRST_CALL}"
                )
            if isinstance(value, COMPUTED):
                if place is not None:
                    raise CarriedError(place)
                left[fqn] = value
            elif key.is_plain or isinstance(value, CONTAINERS):
                tensors = {id(each) for each in walk(value).values() if isinstance(each, torch.Tensor)}
                if not is_same and tensors and tensors <= own.ids:
                    continue  # a new list of the model's weights
                found = pattern_of(fqn, value, [(value, [])] if is_same else (), own)
                if found is None or (is_same and not key.is_plain):
                    raise CaptureError(IN_CONTAINER.format(fqn))
                values[fqn], parts = found
                for part, each in parts.items():
                    _refuse_subclass(part, each)
                left |= parts
            elif not is_same:
                raise CaptureError(
                    f"forward keeps {key} in attribute {fqn!r}, and a captured step would not. Keep tensors and "
                    f"Python values in attributes of their own, or return the object{FIRST_CALL}"
                )
        return left, values


IN_CONTAINER = (
    "forward keeps something in the attribute {!r}, in a container, and a captured step would not: what a later "
    "call reads or adds to, or another object than a tensor or Python value. Make a new list, tuple or dict in each "
    "forward, or keep it in an attribute, or a buffer, of its own"
)


def _varies(value: Any) -> bool:
    """Whether a container, or a tensor's size, has a number that is symbolic."""
    return isinstance(value, CONTAINERS) and any(isinstance(each, py_sym_types) for each in walk(value).values())


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = ([*tensor.stride()],) if tensor.layout == torch.strided else ()
    return [*tensor.shape], *strides, tensor.dtype


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name[0] != "_"}


def _refuse_subclass(fqn: str, value: Any) -> None:
    if is_tensor_subclass(value):
        raise CaptureError(f"forward keeps a {type(value).__name__} in {fqn!r}; keep a plain tensor")


def _kind(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype}{[*tensor.shape]} on {tensor.device}"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{kind} without a gradient" if is_frozen else kind


def _parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    is_sharded, named = bool(fsdp_groups(model)), named_sharded_parameters(model)
    return {fqn: each for fqn, each in named if not (is_sharded and is_tensor_subclass(each))}


def _attributes_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields the attributes of a model's modules that not every module has, by FQN, with the module."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if not is_kept_by_torch(module, name):
                yield f"{fqn}.{name}".lstrip("."), module, value
