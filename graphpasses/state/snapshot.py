"""All that a step holds constant, as it was when it was captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

from graphpasses._torch.fsdp2 import SETTINGS, fsdp_groups, group_name, group_setting
from graphpasses._torch.fsdp2_parameters import find_outdated, find_replaced, find_set_unsharded
from graphpasses._torch.module_hooks import global_hook_ids
from graphpasses._torch.surroundings import function_modes, keeps_parametrized, saved_tensor_hooks
from graphpasses.errors import CaptureError
from graphpasses.identity import named_state
from graphpasses.state.carried import Place
from graphpasses.state.changes import changed_values
from graphpasses.state.keys import TensorFacts
from graphpasses.state.model import ModelStructure
from graphpasses.state.slots import AGAIN, Asked, Owner
from graphpasses.state.unwritten import Unwritten

_SINCE = " when the step was captured"
_HELD = "loss_fn also reads it by a variable of its own"
_IN_BATCH = "give it in the batch, as a tensor, or capture the step again"


_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


@dataclass(eq=False)
class Snapshot:
    """What a graph has built in, and each call of its step checks."""

    structure: ModelStructure  # modules, ties, which parameters are trained
    settings: tuple[Owner, ...]  # of torch and of FSDP2's groups
    # Of the model's modules, and of objects that these hold: those forward read.
    attributes: tuple[Owner, ...] = ()
    names: tuple[Owner, ...] = ()  # values from outside that the step's code reads
    tensors: tuple[Owner, ...] = ()  # shapes and the like of tensors from outside, which the graph keeps
    # Of the model's own tensors, by FQN: those that the step's code also reads by variables of its own.
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _seen: Unwritten | None = field(default=None, init=False)  # as an earlier check found the model

    @classmethod
    def of(
        cls,
        model: nn.Module,
        attributes: Sequence[Owner] = (),
        names: Sequence[Owner] = (),
        held: Collection[str] = (),
        set_modes: Collection[str] = (),
        *,
        calls_hooks: bool = False,
    ) -> Snapshot:
        """Reads a model's structure and the settings; attributes and names were read before."""
        structure, tensors = ModelStructure.of(model, set_modes, calls_hooks=calls_hooks), dict(named_state(model))
        of_held = {fqn: tensor for fqn, tensor in tensors.items() if fqn in held}
        return cls(structure, settings_of(model), tuple(attributes), tuple(names), held=of_held)

    @property
    def outside_model(self) -> list[Owner]:
        """What is no module of the model, of which the step read something."""
        modules = {*map(id, self.structure.modules)}
        return [*self.names, *(owner for owner in self.attributes if id(owner.value) not in modules)]

    def check(self, model: nn.Module, *places: Iterable[Place]) -> list[torch.Tensor | None]:
        """Returns the model's tensors, by slot; raises, and names it, if something is not what it was, or if
        ``places`` that the step reads and leaves are no more the model's.
        """
        tensors = None if self._seen is None else self._seen.tensors(model)
        if tensors is not None and self._seen is not None:
            _refuse(self._seen.owners)
        else:
            seen, self._seen = Unwritten.of(model, self.attributes), None
            tensors = self.structure.check(model)
            if (fqn := find_replaced(fsdp_groups(model))) is not None:
                raise CaptureError(_REPLACED.format(fqn))
            for fqn, tensor in self.structure.named(tensors, self.held).items():
                if tensor is not self.held[fqn]:
                    raise CaptureError(f"{fqn!r} was replaced since the step was captured, and {_HELD}; {AGAIN}")
            if all(map(is_, model.modules(), self.structure.modules)):
                _refuse(self.attributes)
                self._seen = seen
            else:  # a module was replaced by one that is alike, but for what forward read of it
                self.for_model(model, {})
                own = {id(owner.value) for owner in self.attributes} | {*map(id, self.structure.modules)}
                for place in chain(*places):
                    if id(place.owner.value) in own - {*map(id, model.modules())}:
                        raise CaptureError(
                            f"a module was replaced since the step was captured, and {place.name}, which the step "
                            f"leaves, stands in the former; {AGAIN}"
                        )
        _refuse((*self.settings, *self.tensors))
        _refuse(self.names, _IN_BATCH)
        return tensors

    def own_writes(self, *, are_any: bool) -> AbstractContextManager[None]:
        """Takes what the block, which is the step's own, writes into the model for seen, if there ``are_any``."""
        return self._seen.told() if are_any and self._seen is not None else nullcontext()

    def changed_values(self) -> dict[str, Place]:
        """Returns where numbers and tensors are others now, by what messages call them."""
        slots = ((owner, slot) for owner in (*self.attributes, *self.names) for slot in owner.slots.values())
        found = [place for owner, slot in slots for place in changed_values(owner, slot)]
        return {place.name: place for place in reversed(found)}  # of one name the first

    def for_model(self, model: nn.Module, groups: Mapping[str, str]) -> Snapshot:
        """Returns the same of another model, with other process groups, by the names of this one's; raises where that
        is not built as this one was.
        """
        if self.held:
            raise CaptureError(
                f"{next(iter(self.held))!r} is this model's, and {_HELD}; capture the other model's step"
            )
        structure = self.structure.for_model(model, groups)
        others = dict(zip(map(id, self.structure.modules), structure.modules, strict=True))
        known: dict[int, Owner] = {}
        pairs = {(module, id(other)): other for module, other in others.items()}
        for owner in self.attributes:
            if id(owner.value) in others:
                other = others[id(owner.value)]
                _refuse([owner], now=other, alike=pairs)
                owner.of(other, known)
        return Snapshot(structure, settings_of(model), tuple(known.values()), self.names, self.tensors)


def _refuse(owners: Iterable[Owner], advice: str = AGAIN, **options: Any) -> None:
    """Raises if an owner has something else now; options as of :meth:`Owner.difference`."""
    for owner in owners:
        if (found := owner.difference(**options)) is not None:
            raise CaptureError(f"{found.text(_SINCE)}; {advice}")


def settings_of(model: nn.Module) -> tuple[Owner, ...]:
    """Returns the settings that a step's graph has built in; not those that kernels read, as ``cudnn.benchmark``."""
    device = next(nn.Module.parameters(model)).device.type
    has_autocast = torch.amp.is_autocast_available(device)
    # What ``torch.autocast(device)`` takes where it is given none.
    dtype: Callable[[], Any] = partial(torch.get_autocast_dtype, device) if has_autocast else lambda: None
    asked: dict[str, Callable[[], Any]] = {
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.get_default_device()": torch.get_default_device,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
        f"autocast on {device!r}": lambda: dtype() if has_autocast and torch.is_autocast_enabled(device) else None,
        f"torch.get_autocast_dtype({device!r})": dtype,
        "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
        **{f"torch.backends.cuda.{name}()": getattr(cuda, name) for name in _ATTENTION},
        "torch.backends.cudnn.enabled": lambda: cudnn.enabled,
        "torch.backends.mkldnn.enabled": lambda: mkldnn.enabled,
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
        "the TorchFunctionModes that are on": function_modes,
        "torch.autograd.graph.saved_tensors_hooks": saved_tensor_hooks,
        "torch.nn.utils.parametrize.cached()": keeps_parametrized,
        "the hooks of all modules (register_module_forward_hook and others)": global_hook_ids,
        **{
            f"{name} of FSDP2 group {group_name(group)!r}": partial(group_setting, group, name)
            for group in fsdp_groups(model)
            for name in SETTINGS
        },
    }
    owners = tuple(Owner(Asked(ask)) for ask in asked.values())
    for name, owner in zip(asked, owners, strict=True):
        owner.add(name, name)
    return owners


def tensor_owner(tensor: torch.Tensor) -> Owner:
    """Returns the owner of what a graph has built in of a tensor from outside, which it keeps."""
    before = TensorFacts.of(tensor), tensor.requires_grad
    text = str(before[0])

    def ask() -> str:
        now = TensorFacts.of(tensor), tensor.requires_grad
        return text if now == before else f"{now[0]}{', which requires a gradient' if now[1] else ''}"

    owner = Owner(Asked(ask))
    owner.add("", "a tensor from outside that loss_fn reads")
    return owner


_REPLACED = (
    "parameter {!r} was replaced after a forward (another nn.Parameter, or other memory): eager FSDP2 gathers what "
    "was there before. Write into it (copy_), or give it with load_state_dict"
)
_NOT_FOLLOWED: dict[Callable[[Sequence[Any]], str | None], str] = {
    find_outdated: (
        "parameter {!r} changed while it was unsharded, as a forward without a backward leaves it (an evaluation "
        "before optimizer.step()), or set_reshard_after_backward(False): eager FSDP2 would train on with the old "
        "values. Call reshard() on its fully_sharded module before it changes"
    ),
    find_set_unsharded: (
        "requires_grad of parameter {!r} was set while it was unsharded, as a forward without a backward leaves it: "
        "eager FSDP2 obeys it for one step, and forgets it then. Call reshard() on its fully_sharded module before"
    ),
    find_replaced: _REPLACED,
}


def check_unsharded(groups: Sequence[Any]) -> None:
    """Raises if a parameter changed in a way that eager FSDP2 does not follow: it would train on with what it was."""
    for find, refusal in _NOT_FOLLOWED.items():
        if (fqn := find(groups)) is not None:
            raise CaptureError(refusal.format(fqn))


# ---- whether something was written ------------------------------------------------------------------
