"""What a step leaves in a model: buffers that it replaces, attributes that it sets; and how all of it is put back."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.types import py_sym_types

from graphpasses._torch import pytree
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_parameters import named_sharded_parameters
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.storage import memories
from graphpasses.errors import CaptureError
from graphpasses.identity import RESTORED, attributes_restored, put_back
from graphpasses.state.counted import CountedError, is_number
from graphpasses.state.keys import key_of
from graphpasses.state.model import is_trained, with_gradients


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns what :class:`LeftTensors` looks at: parameters, but for FSDP2's, which come and go, buffers, and the
    tensors that attributes of modules are, or contain, by FQN.
    """
    parts = [_parts_of(fqn, container) for fqn, container in _containers(model).items()]
    tensors = {name: each for held in parts for name, each in held.items() if isinstance(each, torch.Tensor)}
    return _own_tensors(model) | {name: each for name, each in tensors.items() if not isinstance(each, nn.Parameter)}


def _held_values(model: nn.Module) -> dict[str, Any]:
    """Returns the modes of a model's modules, and attributes that are Python values, not objects, by FQN."""
    return {
        fqn: value
        for fqn, module, value in _attributes_of(model)
        if not isinstance(module, nn.parallel.DistributedDataParallel)  # which keeps its own accounts
        if key_of(value).is_plain or isinstance(value, py_sym_types)
    }


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
class Same:
    """Stands for a list, dict or set that stays the same object, and gets these items."""

    items: Any


@dataclass(frozen=True)
class Computed:
    """Stands in a list, tuple or dict for what a step computes."""

    name: str


def leave(model: nn.Module, computed: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Gives modules of a model what a step computed, for buffers and attributes, and Python values."""
    alone = dict(computed)

    def part(each: Any) -> Any:
        return alone.pop(each.name) if isinstance(each, Computed) else copy.copy(each)

    # New lists, which others may change.
    made = {fqn: pytree.tree_map(part, value, is_leaf=_is_size) for fqn, value in values.items()}
    for fqn, value in (made | alone).items():
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        places = module._parameters, module._buffers, vars(module)
        place: Any = next((each for each in places if name in each), vars(module))
        before = place.get(name)
        if isinstance(value, Same):
            put_back(before, copy.deepcopy(value.items))
        elif place is module._parameters:
            place[name] = nn.Parameter(value, requires_grad=before.requires_grad)
        elif before is not value:
            place[name] = value


@contextmanager
def live_state_restored(model: nn.Module) -> Iterator[None]:
    """Restores parameters, buffers, attributes and gradients of a model, and the state of random number generators.

    Tensors are put back, also their memory where another was assigned to their ``data``, not what was written into
    them; of attributes that are lists, dicts and sets the items, too.
    """
    gradients = [(parameter, parameter.grad) for parameter in with_gradients(model)]
    assigned = Assigned(model)
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    try:
        with attributes_restored(model.modules()), torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for tensor, before in assigned.changed().values():
            tensor.data = before
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


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
    named = [*_without_containers(model).items(), *model.named_parameters(), *leaves]
    found = [(name, each, _shape(each), _attributes(each)) for name, each in named]
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
        self._held = held_tensors(model)
        self._keys = {fqn: key_of(value) for fqn, value in _held_values(model).items()}
        self._attributes = {fqn: value for fqn, _, value in _attributes_of(model)}
        self._known = {id(each) for value in _containers(model).values() for each in _leaves(value)}

    def changed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tensors that are others than before, by FQN, and the Python values."""
        left, values = held_tensors(self._model), _held_values(self._model)
        return (
            {fqn: each for fqn, each in left.items() if each is not self._held.get(fqn)},
            {fqn: each for fqn, each in values.items() if self._keys.get(fqn) != key_of(each)},
        )

    def trained(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers that are others than before, by FQN, and may get gradients."""
        left, own = self.changed()[0], _parameters_of(self._model) | dict(self._model.named_buffers())
        return {fqn: each for fqn, each in own.items() if left.get(fqn) is each and is_trained(each)}

    def find(self, has_read: Callable[[nn.Module, str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what the step computed and left, by FQN, and the Python values; raises where a captured step could
        not leave them.

        ``has_read`` says whether forward read an attribute of a module before it set it.
        """
        left, values = self.changed()
        for fqn in self._attributes.keys() - {fqn for fqn, *_ in _attributes_of(self._model)}:
            raise CaptureError(f"forward deletes attribute {fqn!r}, and a captured step would not{FIRST_CALL}")
        containers = _containers(self._model)
        for fqn, _, value in _attributes_of(self._model):
            is_another = value is not (before := self._attributes.get(fqn)) and key_of(value) != key_of(before)
            if is_another and not (fqn in left or fqn in values or fqn in containers):
                raise CaptureError(
                    f"forward keeps {key_of(value)} in attribute {fqn!r}, and a captured step would not. Keep "
                    f"tensors and Python values in attributes of their own, or return the object{FIRST_CALL}"
                )
        own = _own_tensors(self._model)
        left = {fqn: each for fqn, each in left.items() if fqn in own}
        left |= {fqn: values.pop(fqn) for fqn in [*values] if isinstance(values[fqn], py_sym_types)}
        for fqn, value in left.items():
            owner, _, name = fqn.rpartition(".")
            module = self._model.get_submodule(owner)
            _refuse_subclass(fqn, value)
            if name not in module._buffers and name not in module._parameters:
                if has_read(module, name):
                    if isinstance(value, py_sym_types) and is_number(self._attributes.get(fqn)):
                        raise CountedError(fqn)
                    raise CaptureError(read_before(fqn))
            elif (before := _kind(self._held[fqn])) != (now := _kind(value)):
                what = "buffer" if name in module._buffers else "parameter"
                raise CaptureError(
                    f"forward replaces {what} {fqn!r}, {before}, by {now}, and the next call would read another kind "
                    f"of tensor than was captured{FIRST_CALL}"
                )
        for fqn, value in values.items():
            if value is self._attributes.get(fqn) and isinstance(value, RESTORED):
                values[fqn] = Same(value.copy())
        known = self._known | {id(each) for each in self._model.parameters()}  # an RNN's list of its weights
        known |= {id(each) for fqn, each in own.items() if fqn not in left}
        for fqn, container in containers.items():
            parts = _parts_of(fqn, container)
            num_known = sum(id(each) in known for each in parts.values())
            if num_known == len(parts):
                continue
            owner, _, name = fqn.rpartition(".")
            is_old = container is self._attributes.get(fqn)
            if not is_old and has_read(self._model.get_submodule(owner), name):
                raise CaptureError(read_before(fqn))
            others = [each for each in _leaves(container) if not isinstance(each, COMPUTED)]
            if num_known or is_old or not all(key_of(each).is_plain for each in others):
                raise CaptureError(_IN_CONTAINER.format(fqn))
            for part, each in parts.items():
                _refuse_subclass(part, each)
            left |= parts
            values[fqn] = _with_names(container, iter(parts))
        return left, values


_MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}
COMPUTED = (torch.Tensor, *py_sym_types)
"""What a step computes: a number that it reads of a tensor, as by ``.item()``, is symbolic while it is traced."""
_IN_CONTAINER = (
    "forward keeps a tensor, or its .item(), in the attribute {!r}, in a container, and a captured step would not: "
    "what reads it later would find an old one. Make a new list, tuple or dict in each forward, of nothing else, or "
    "keep it in an attribute, or a buffer, of its own"
)
FIRST_CALL = ". If it does so at the first call only, run loss_fn once before the capture"


def _is_size(value: Any) -> bool:
    """Whether a value is the size of a tensor, of which pytree would make a tuple."""
    return isinstance(value, torch.Size)


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = ([*tensor.stride()],) if tensor.layout == torch.strided else ()
    return [*tensor.shape], *strides, tensor.dtype


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name[0] != "_"}


def _with_names(container: Any, names: Iterator[str]) -> Any:
    return pytree.tree_map(lambda each: Computed(next(names)) if isinstance(each, COMPUTED) else each, container)


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


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return _parameters_of(model) | _without_containers(model)


def _without_containers(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {fqn: value for fqn, _, value in _attributes_of(model) if isinstance(value, torch.Tensor)}
    own = {fqn: tensor for fqn, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    return {**dict(model.named_buffers()), **own}


def _containers(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a model's modules that are containers of what is computed, by FQN."""
    return {
        fqn: value
        for fqn, _, value in _attributes_of(model)
        if not isinstance(value, COMPUTED) and any(isinstance(each, COMPUTED) for each in _leaves(value))
    }


def _parts_of(fqn: str, container: Any) -> dict[str, Any]:
    """Returns what is computed of that which a container holds, by name."""
    leaves = (each for each in _leaves(container) if isinstance(each, COMPUTED))
    return {f"{fqn}[{index}]": each for index, each in enumerate(leaves)}


def _attributes_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields the attributes of a model's modules that not every module has, by FQN, with the module."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _MODULE_STATE:
                yield f"{fqn}.{name}".lstrip("."), module, value


def _leaves(value: Any) -> list[Any]:
    seen: dict[int, Any] = {}  # a list may hold itself

    def is_leaf(each: Any) -> bool:
        is_seen = id(each) in seen
        seen[id(each)] = each
        return is_seen

    return pytree.tree_leaves(value, is_leaf=is_leaf)
