"""What a step leaves in a model's modules: buffers that forward replaces, and attributes that it sets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphpasses._torch import pytree
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses.errors import CaptureError
from graphpasses.state.keys import key_of


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers of a model, and the tensors that are attributes of its modules, by FQN."""
    attributes = {
        f"{fqn}.{name}".lstrip("."): value
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }
    return {**dict(model.named_buffers()), **attributes}


def held_values(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a model's modules that are Python values, not objects, by FQN."""
    return {
        f"{fqn}.{name}".lstrip("."): value
        for fqn, module in model.named_modules()
        if not isinstance(module, nn.parallel.DistributedDataParallel)  # which keeps its own accounts
        for name, value in vars(module).items()
        if name not in _MODULE_STATE and (key_of(value).is_plain or _is_symbolic(value))
    }


def changed_values(model: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those that are others than before."""
    return {
        fqn: value
        for fqn, value in held_values(model).items()
        if fqn not in before or key_of(value) != key_of(before[fqn])
    }


def read_before(fqn: str) -> str:
    """Says why an attribute is refused that forward reads and then sets."""
    return (
        f"forward reads the attribute {fqn!r} and keeps a tensor in it, and a captured step would read the old one "
        "at each call. If it is kept at the first call only, run loss_fn once before the capture; else make it a "
        f"buffer, e.g. register_buffer({fqn.rpartition('.')[2]!r}, ..., persistent=False), which a step reads anew"
    )


def leave(model: nn.Module, fqn: str, value: Any) -> None:
    """Gives a module of a model a tensor for a buffer, or a value for an attribute."""
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    (module._buffers if name in module._buffers else vars(module))[name] = (
        value if isinstance(value, torch.Tensor) else copy.deepcopy(value)  # a list, which others may change
    )


@contextmanager
def shapes_kept(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Raises if the block, a step, gives a tensor of the model's modules or of the batch another shape in place."""
    named = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}
    shapes = [(name, each, _shape(each)) for name, each in (*held_tensors(model).items(), *named.items())]
    yield
    for name, tensor, before in shapes:
        if str(now := _shape(tensor)) != str(before):  # a size that varies may be known by now
            raise CaptureError(
                f"loss_fn gives {name!r} another shape in place ({before}, then {now}: sizes, strides), as "
                "unsqueeze_, resize_ and observers of torch.ao do, and a captured step would not. Compute with "
                f"another tensor, e.g. x.unsqueeze(1){_FIRST_CALL}"
            )


class LeftTensors:
    """What a traced step leaves in the modules of a model: the difference between now and when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held, self._values = held_tensors(model), held_values(model)
        self._known = {id(tensor) for _, tensor in _in_containers(model)}

    def find(self, has_read: Callable[[nn.Module, str], bool]) -> dict[str, torch.Tensor]:
        """Returns the tensors that the step left, by FQN; raises where a captured step could not leave them.

        ``has_read`` says whether forward read an attribute of a module before it set it.
        """
        held = held_tensors(self._model)
        left = {fqn: tensor for fqn, tensor in held.items() if tensor is not self._held.get(fqn)}
        for fqn, tensor in left.items():
            owner, _, name = fqn.rpartition(".")
            module = self._model.get_submodule(owner)
            if is_tensor_subclass(tensor):
                raise CaptureError(f"forward keeps a {type(tensor).__name__} in {fqn!r}; keep a plain tensor")
            if name not in module._buffers and has_read(module, name):
                raise CaptureError(read_before(fqn))
            before, now = (_kind(each) for each in (self._held.get(fqn, tensor), tensor))
            if name in module._buffers and before != now:
                raise CaptureError(
                    f"forward replaces buffer {fqn!r}, {before}, by {now}, and the next call would read another kind "
                    f"of tensor than was captured{_FIRST_CALL}"
                )
        known = self._known | {id(each) for each in self._model.parameters()}  # an RNN's list of its weights
        known |= {id(each) for each in held.values()}
        for fqn, tensor in _in_containers(self._model):
            if id(tensor) not in known:
                raise CaptureError(
                    f"forward keeps a tensor in the attribute {fqn!r}, in a container, and a captured step would "
                    "not: what reads it later would find an old one. Keep it in an attribute, or a buffer, of its own"
                )
        return left

    def find_values(self) -> dict[str, Any]:
        """Returns the Python values that the step left, by FQN; raises where the batch decides which."""
        values = changed_values(self._model, self._values)
        if fqn := next((fqn for fqn, value in values.items() if _is_symbolic(value)), None):
            raise CaptureError(
                f"forward keeps in the attribute {fqn!r} a number that follows from the step's tensors, and a "
                "captured step would not. Keep a tensor, e.g. loss.detach() for loss.item(), or compute it outside"
            )
        return values


_MODULE_STATE = frozenset(vars(nn.Module()))
_FIRST_CALL = ". If it does so at the first call only, run loss_fn once before the capture"


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _shape(tensor: torch.Tensor) -> tuple[list[Any], ...]:
    strides = ([*tensor.stride()],) if tensor.layout == torch.strided else ()
    return [*tensor.shape], *strides


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{[*tensor.shape]} on {tensor.device}"


def _in_containers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in lists, tuples and dicts that are attributes of modules, with the attribute's FQN."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, torch.Tensor):
                for leaf in _leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        yield f"{fqn}.{name}".lstrip("."), leaf


def _leaves(value: Any) -> list[Any]:
    seen: dict[int, Any] = {}  # a list may hold itself

    def is_leaf(each: Any) -> bool:
        is_seen = id(each) in seen
        seen[id(each)] = each
        return is_seen

    return pytree.tree_leaves(value, is_leaf=is_leaf)
