"""The structure of a model that a step has built in: its modules, which tensors there are, ties, what is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_hooks import (
    gradient_hook_ids,
    gradient_hooks,
    hook_dicts,
    hook_ids,
    hooks_in_backward,
    unsaved_buffers,
)
from graphpasses._torch.optimizers import optimizers_in_backward
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torchtitan import wrapped_class
from graphpasses.errors import CaptureError
from graphpasses.identity import walk_modules
from graphpasses.state.keys import TensorFacts, key_of
from graphpasses.state.slots import AGAIN, FIRST_CALL, Difference, changed

# Of a module: also the ``forward`` that was set on it, and the names of its parameters, buffers and modules.
_FACTS = ("__class__", "training", "forward", "hooks", "names")


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """What a graph has built in of the modules and tensors of a model."""

    modules: list[nn.Module]  # in the order of ``model.modules()``
    paths: tuple[str, ...]  # the first FQN of each
    facts: list[tuple[Any, ...]]  # of each, see _FACTS
    names: list[tuple[tuple[str, ...], tuple[str, ...]]]  # of each: of its own parameters, and of its buffers
    slots: Mapping[str, int]  # by any FQN, the position of a parameter or buffer among those of all modules
    first: list[int]  # for each position, the first at which the same tensor is; -1 where there is None
    parameters: frozenset[int]  # the positions of parameters; the others are buffers'
    trainable: Mapping[int, bool]  # by first position of a tensor, whether it gets a gradient
    kinds: list[TensorFacts | None]  # of the tensors
    hooks: tuple[tuple[int, ...], ...]  # which wait for the gradients of each trainable one
    set_modes: frozenset[int] = frozenset()  # positions of modules whose mode forward sets itself

    @classmethod
    def of(cls, model: nn.Module, set_modes: Collection[str] = (), *, calls_hooks: bool = False) -> ModelStructure:
        """Reads a model; of modules whose FQNs are in ``set_modes`` forward sets the mode before it reads it. Raises
        where a hook waits for a gradient, unless the graph ``calls_hooks``.
        """
        modules = [*model.modules()]
        names = [(tuple(module._parameters), tuple(module._buffers)) for module in modules]
        sizes = (len(of_parameters) + len(of_buffers) for of_parameters, of_buffers in names)
        starts = dict(zip(modules, accumulate(sizes, initial=0), strict=False))
        paths: dict[nn.Module, str] = {}
        slots: dict[str, int] = {}
        for path, module in walk_modules(model):
            paths.setdefault(module, path)
            own = (*module._parameters, *module._buffers)
            slots |= {f"{path}.{name}".lstrip("."): slot for slot, name in enumerate(own, starts[module])}
        tensors = _tensors(modules, names)
        first = _first(tensors)
        parameters = (range(start, start + len(module._parameters)) for module, start in starts.items())
        trainable = {
            slot: is_trained(tensor)
            for slot, tensor in enumerate(tensors)
            if tensor is not None and first[slot] == slot
        }
        fqns = tuple(paths[module] for module in modules)
        of_parameters = frozenset(chain.from_iterable(parameters))
        modes = frozenset(index for index, fqn in enumerate(fqns) if fqn in set_modes)
        facts, kinds = _facts(modules, modes), _kinds(tensors)
        hooks = gradient_hook_ids([tensor for slot in trainable if (tensor := tensors[slot]) is not None])
        hooked = {slot for slot, each in zip(trainable, hooks, strict=True) if each}
        if hooked and not calls_hooks:
            raise hook_error(next(fqn for fqn, slot in slots.items() if slot in hooked))
        return cls(modules, fqns, facts, names, slots, first, of_parameters, trainable, kinds, hooks, modes)

    def for_model(self, model: nn.Module, groups: Mapping[str, str]) -> ModelStructure:
        """Returns the structure of another model; raises where that is not built as this one was."""
        modules, facts = self._modules(model, _alike)
        kinds = [kind and kind.in_groups(groups) for kind in self.kinds]
        self._tensors(modules, kinds)
        return replace(self, modules=modules, facts=facts, kinds=kinds)

    def check(self, model: nn.Module) -> list[torch.Tensor | None]:
        """Returns the model's tensors, by slot; raises if it is not what it was: the graph would go on regardless."""
        return self._tensors(self._modules(model)[0])

    def named(self, tensors: Sequence[torch.Tensor | None], fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors, as :meth:`check` returned them, by the FQNs of parameters and buffers."""
        found = ((fqn, tensors[self.slots[fqn]]) for fqn in fqns)
        return {fqn: tensor for fqn, tensor in found if tensor is not None}

    def _modules(
        self, model: nn.Module, counting: Callable[..., tuple[Any, ...]] = lambda *facts: facts
    ) -> tuple[list[nn.Module], list[tuple[Any, ...]]]:
        """Returns a model's modules and their facts; raises if these differ in what counts of them."""
        modules = [*model.modules()]
        if len(modules) != len(self.paths):
            raise changed("the model", f"{len(self.paths)} modules", len(modules), has=True)
        if (facts := _facts(modules, self.set_modes)) != self.facts:
            for path, before, now in zip(self.paths, self.facts, facts, strict=True):
                counts = zip(_FACTS, before, now, counting(*before), counting(*now), strict=True)
                for name, was, is_now, counted, counts_now in counts:
                    if counted != counts_now:
                        part = Difference(f"{path}.{name}".lstrip("."), key_of(was), key_of(is_now), False)
                        raise CaptureError(f"{part.text(' when the step was captured')}; {AGAIN}")
        return modules, facts

    def _tensors(
        self, modules: Iterable[nn.Module], kinds: Sequence[TensorFacts | None] | None = None
    ) -> list[torch.Tensor | None]:
        """Returns the tensors of modules; raises if they are not what they were."""
        tensors = _tensors(modules, self.names)
        if (first := _first(tensors)) != self.first:
            self._refuse_ties(first)
        for slot, (kind, now) in enumerate(zip(kinds or self.kinds, _kinds(tensors), strict=True)):
            if kind is not None and now is not None and kind != now:
                raise changed(repr(self._name(slot)), *kind.told_from(now))
        trained = [tensor for slot in self.trainable if (tensor := tensors[slot]) is not None]
        for parameter, (slot, was) in zip(trained, self.trainable.items(), strict=True):
            if is_trained(parameter) != was:
                raise changed(self._kind(slot), f"requires_grad={was}", not was, has=True)
            if (how := waiting_hook(parameter)) is not None:
                raise hook_error(self._name(slot), how)
        if (hooks := gradient_hook_ids(trained)) != self.hooks:
            for slot, known, found in zip(self.trainable, self.hooks, hooks, strict=True):
                if known != found:
                    raise changed(self._kind(slot), f"gradient hooks {[*known]}", [*found], has=True)
        return tensors

    def _refuse_ties(self, first: Sequence[int]) -> None:
        for slot, (was, now) in enumerate(zip(self.first, first, strict=True)):
            if was == now:
                continue
            name = self._name(slot)
            if was == -1:
                raise CaptureError(f"{name!r} was None when the step was captured, and is not now; {AGAIN}")
            if now == -1:
                raise CaptureError(
                    f"the model has no parameter or buffer {name!r} any more; the captured step reads it. "
                    "Capture the step again after changing the model"
                )
            if was != slot:
                raise CaptureError(
                    f"{self._name(was)!r} and {name!r} were one tensor when the step was captured, and are not now; "
                    f"{AGAIN}"
                )
            kind = "parameters" if slot in self.parameters else "buffers"
            raise CaptureError(
                f"{self._name(now)!r} and {name!r} were two {kind} when the step was captured, and are one now; "
                f"{AGAIN}"
            )

    def _kind(self, slot: int) -> str:
        return f"{'parameter' if slot in self.parameters else 'buffer'} {self._name(slot)!r}"

    def _name(self, slot: int) -> str:
        return next(fqn for fqn, other in self.slots.items() if other == slot)


def is_trained(tensor: torch.Tensor) -> bool:
    """Whether backward fills the gradient of a parameter or buffer; not of what forward leaves with its history."""
    return tensor.requires_grad and tensor.is_leaf


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers whose gradients backward fills, under all their FQNs."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    trained = {fqn: parameter for fqn, parameter in parameters if parameter.requires_grad}
    return trained | {fqn: buffer for fqn, buffer in buffers if is_trained(buffer)}


def waiting_hook(parameter: torch.Tensor) -> str | None:
    """Says how a hook that no trace calls came to wait for the gradient of a parameter; None if none does."""
    if optimizers_in_backward(parameter) and not hooks_in_backward(parameter):
        return " (apply_optimizer_in_backward(..., register_hook=False), for DistributedDataParallel)"
    if is_tensor_subclass(parameter) and gradient_hooks(parameter):
        return " (register_hook of a DTensor; take register_post_accumulate_grad_hook)"
    return None


def hook_error(fqn: str, kind: str = "") -> CaptureError:
    """Returns the error of a parameter for whose gradient a hook waits, of some kind."""
    return CaptureError(
        f"a hook on parameter {fqn!r} waits for its gradient{kind}; a captured step does not call it. Remove it, and "
        "do after the step what it does"
    )


def structure_check(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Returns what raises if a step changes which modules a model has, their ties, or what counts of them, but for
    their modes; ``tensors`` are its own, for which others stand.
    """
    before, modules = dict(model.named_modules()), [*model.modules()]
    every = frozenset(range(len(modules)))
    names = [(tuple(module._parameters), tuple(module._buffers)) for module in modules]

    def ties() -> list[int]:
        # Of a DTensor each name is traced by a tensor of its own, and FSDP2 puts others there.
        return _first([None if is_tensor_subclass(each) else each for each in _tensors(modules, names)])

    watched = trained_state(model)
    # While these are traced they answer for what stands for them.
    own = [*map(hook_dicts, tensors.values())]

    def hooks() -> list[list[int]]:
        return [[*chain.from_iterable(each)] for each in (*own, *map(hook_dicts, watched.values()))]

    facts, tied, unsaved = _facts(modules, every), ties(), [*map(unsaved_buffers, modules)]
    hooked = hooks()

    def check() -> None:
        for fqn, module in model.named_modules():
            if before.get(fqn) is not module:
                what = "puts another module in the place of" if fqn in before else "adds a module,"
                raise CaptureError(f"forward {what} {fqn!r}, and a captured step would not{FIRST_CALL}")
        for fqn, known, now in zip(before, facts, _facts(modules, every), strict=True):
            for name, was, is_now in zip(_FACTS, known, now, strict=True):
                # Which parameters and buffers there are is looked at elsewhere.
                if was != is_now and (name != "names" or {*was} == {*is_now}):
                    what = f"{fqn}.{name}".lstrip(".")
                    raise CaptureError(
                        f"forward changes {what!r} of a module, and a captured step would not{FIRST_CALL}"
                    )
        for fqn, was_hooked, is_hooked in zip((*tensors, *watched), hooked, hooks(), strict=True):
            if was_hooked != is_hooked:
                raise CaptureError(
                    f"loss_fn, or a hook, adds or removes a hook that gets the gradient of {fqn!r}, and a captured "
                    f"step would not{FIRST_CALL}"
                )
        if [*map(unsaved_buffers, modules)] != unsaved:
            raise CaptureError(f"forward sets whether a buffer is saved, and a captured step would not{FIRST_CALL}")
        if any(was != now for was, now in zip(tied, ties(), strict=True) if -1 not in (was, now)):
            raise CaptureError(
                f"forward ties two parameters, or parts them, and a captured step would not{FIRST_CALL}"
            )

    return check


def _facts(modules: Iterable[nn.Module], set_modes: Collection[int] = ()) -> list[tuple[Any, ...]]:
    facts: list[tuple[Any, ...]] = []
    for index, module in enumerate(modules):
        state = vars(module)
        # A module that was set and taken out again (a cache) leaves a name: whoever reads it finds None, as before.
        children = (name for name, module in state["_modules"].items() if module is not None)
        names = (*state["_parameters"], *state["_buffers"], *children)
        mode = None if index in set_modes else state["training"]
        facts.append((type(module), mode, state.get("forward"), hook_ids(module), names))
    return facts


def _alike(
    kind: type, training: bool, forward: Any, hooks: tuple[int, ...], names: tuple[str, ...]
) -> tuple[Any, ...]:
    """Returns what modules of two models that were built alike share of their facts."""
    return _made_of(kind) or kind, training, forward is not None, len(hooks), names


def _made_of(kind: type) -> tuple[Any, ...]:
    """Returns the parts of a class that SimpleFSDP or ``torch.nn.utils.parametrize`` makes for each model, or ()."""
    base = kind.__bases__[0]
    if kind.__name__ == f"Parametrized{base.__name__}":  # its parametrizations are modules, compared as such
        return base, *sorted(name for name, value in vars(kind).items() if isinstance(value, property))
    return wrapped_class(kind)


def _tensors(modules: Iterable[nn.Module], names: Iterable[tuple[tuple[str, ...], ...]]) -> list[torch.Tensor | None]:
    """Returns the modules' own parameters and then buffers, by the names that they had."""
    tensors: list[torch.Tensor | None] = []
    for module, (parameters, buffers) in zip(modules, names, strict=True):
        state = vars(module)
        if parameters:
            tensors += map(state["_parameters"].get, parameters)
        if buffers:
            tensors += map(state["_buffers"].get, buffers)
    return tensors


def _first(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Returns for each tensor the first position at which it is; for None -1."""
    seen = {id(None): -1}
    return [seen.setdefault(id(tensor), slot) for slot, tensor in enumerate(tensors)]


def _kinds(tensors: Sequence[torch.Tensor | None]) -> list[TensorFacts | None]:
    return [None if tensor is None else TensorFacts.of(tensor) for tensor in tensors]
