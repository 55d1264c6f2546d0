"""What a captured step takes for granted of its model, and whether the model still is so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpasses._torch.optimizer_in_backward import find_gradient_hooks
from graphpasses.errors import CaptureError
from graphpasses.graph.module_facts import AttributesRead, ModuleFacts, SharedValue
from graphpasses.identity import walk_modules

__all__ = ["ModelFacts", "check_gradient_hooks"]


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that a graph has built in: its modules, which parameters are trained, ties.

    Args:
        paths: the first FQN of each module, in the order of ``model.modules()``.
        modules: the facts of each.
        shared: the lists, dicts and objects that modules' attributes hold.
        slots: by FQN, any of them, the position of a parameter or buffer among those of all modules.
        first: for each position, the first at which the same tensor is; -1 where there is None.
        trainable: for each position that is a parameter's first, whether it is trainable.
        kinds: the tensors' dtypes, their devices and their shapes.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> facts = ModelFacts.of(model)
        >>> [tensor is not None for tensor in facts.check(model)]
        [True, True]
        >>> _ = model[1].eval()
        >>> facts.check(model)
        Traceback (most recent call last):
        graphpasses.errors.CaptureError: module '1' was in training mode when the step was ...
    """

    paths: tuple[str, ...]
    modules: tuple[ModuleFacts, ...]
    shared: tuple[SharedValue, ...]
    slots: Mapping[str, int]
    first: list[int]
    trainable: Mapping[int, bool]
    kinds: tuple[list[Any], ...]

    @classmethod
    def of(cls, model: nn.Module, read: Mapping[nn.Module, AttributesRead] | None = None) -> ModelFacts:
        """Reads a model.

        Args:
            model: the model.
            read: which attributes of its modules the step has built in.
        """
        modules, read = _modules(model), read or {}
        facts = tuple(ModuleFacts.of(module, read.get(module, AttributesRead())) for module in modules)
        tensors: list[torch.Tensor | None] = []
        starts: dict[nn.Module, int] = {}
        parameters: list[int] = []
        for module, of_module in zip(modules, facts, strict=True):
            starts[module] = len(tensors)
            parameters += range(len(tensors), len(tensors) + len(of_module.parameters))
            tensors += of_module.tensors(module)
        paths: dict[nn.Module, str] = {}
        slots: dict[str, int] = {}
        for path, module in walk_modules(model):
            paths.setdefault(module, path)
            names = (*module._parameters, *module._buffers)
            slots |= {f"{path}.{name}".lstrip("."): slot for slot, name in enumerate(names, starts[module])}
        first = _first(tensors)
        trainable = {
            slot: parameter.requires_grad
            for slot in parameters
            if (parameter := tensors[slot]) is not None and first[slot] == slot
        }
        return cls(
            tuple(paths[module] for module in modules),
            facts,
            tuple({id(value.value): value for each in facts for value in each.shared_values()}.values()),
            slots,
            first,
            trainable,
            _kinds(tensors),
        )

    def for_model(self, model: nn.Module) -> ModelFacts:
        """Returns the same facts of another model, which must be built as this one was.

        Args:
            model: the other model.

        Raises:
            CaptureError: it names what differs.
        """
        modules = self._modules(model)
        self._refuse_modules(modules, range(len(modules)), is_same_model=False)
        self._check_tensors(
            [t for facts, module in zip(self.modules, modules, strict=True) for t in facts.tensors(module)]
        )
        return ModelFacts.of(model, {m: facts.read for m, facts in zip(modules, self.modules, strict=True)})

    def check(self, model: nn.Module) -> list[torch.Tensor | None]:
        """Raises if the model is not what it was: the graph would go on as if it were.

        Args:
            model: the model.

        Returns:
            Its parameters and buffers, by slot.

        Raises:
            CaptureError: it names what changed: a module's class, mode, hooks or ``forward``, an attribute that the
                step read, ``requires_grad``, a tie, or a hook on a parameter's gradient.
        """
        modules = self._modules(model)
        tensors: list[torch.Tensor | None] = []
        suspects: Sequence[int] = []
        for index, (module, facts) in enumerate(zip(modules, self.modules, strict=True)):
            if not facts.holds(module):
                suspects = [*suspects, index]
            tensors += facts.tensors(module)
        if not all(value.holds() for value in self.shared):
            suspects = range(len(modules))
        self._refuse_modules(modules, suspects)
        self._check_tensors(tensors)
        return tensors

    def named(self, tensors: Sequence[torch.Tensor | None], fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors by their FQNs.

        Args:
            tensors: the model's, as :meth:`check` returned them.
            fqns: of parameters or buffers.
        """
        found = ((fqn, tensors[self.slots[fqn]]) for fqn in fqns)
        return {fqn: tensor for fqn, tensor in found if tensor is not None}

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        modules = _modules(model)
        if len(modules) != len(self.modules):
            raise CaptureError(
                f"the model had {len(self.modules)} modules when the step was captured, and has {len(modules)} now; "
                f"{_AGAIN}"
            )
        return modules

    def _refuse_modules(
        self, modules: Sequence[nn.Module], suspects: Iterable[int], *, is_same_model: bool = True
    ) -> None:
        for index in suspects:
            found = self.modules[index].difference(
                modules[index], self.paths[index], is_same_model=is_same_model
            )
            if found:
                raise CaptureError(f"{found}; {_AGAIN}")

    def _check_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if (first := _first(tensors)) != self.first:
            self._refuse_ties(tensors, first)
        if (kinds := _kinds(tensors)) != self.kinds:
            before, now = ([*zip(*each, strict=True)] for each in (self.kinds, kinds))
            slot = next(slot for slot, kind in enumerate(now) if kind != before[slot])
            was, is_now = (
                f"{dtype}{[*shape]} on {device}" for dtype, device, shape in (before[slot], now[slot])
            )
            raise CaptureError(
                f"{self._name(slot)!r} was {was} when the step was captured, and is {is_now} now; {_AGAIN}"
            )
        trained = [tensor for slot in self.trainable if (tensor := tensors[slot]) is not None]
        if [parameter.requires_grad for parameter in trained] != [*self.trainable.values()]:
            for parameter, (slot, was_trainable) in zip(trained, self.trainable.items(), strict=True):
                if parameter.requires_grad != was_trainable:
                    raise CaptureError(
                        f"parameter {self._name(slot)!r} had requires_grad={was_trainable} when the step was "
                        f"captured, and has {parameter.requires_grad} now; {_AGAIN}"
                    )
        if (index := find_gradient_hooks(trained)) is not None:
            check_gradient_hooks(self._name([*self.trainable][index]), trained[index])

    def _refuse_ties(self, tensors: Sequence[torch.Tensor | None], first: Sequence[int]) -> None:
        for slot, (was, now) in enumerate(zip(self.first, first, strict=True)):
            if was == now:
                continue
            name = self._name(slot)
            if was == -1:
                raise CaptureError(f"{name!r} was None when the step was captured, and is not now; {_AGAIN}")
            if now == -1:
                raise CaptureError(
                    f"the model has no parameter or buffer {name!r} any more; the captured step reads it. "
                    "Capture the step again after changing the model"
                )
            if was != slot:
                raise CaptureError(
                    f"{self._name(was)!r} and {name!r} were one tensor when the step was captured, and are not now; "
                    f"{_AGAIN}"
                )
            kind = "parameters" if slot in self.trainable else "buffers"
            raise CaptureError(
                f"{self._name(now)!r} and {name!r} were two {kind} when the step was captured, and are one now; "
                f"{_AGAIN}"
            )

    def _name(self, slot: int) -> str:
        return next(fqn for fqn, other in self.slots.items() if other == slot)


_AGAIN = "capture the step again, or undo the change"


def check_gradient_hooks(fqn: str, parameter: torch.Tensor) -> None:
    """Raises if a hook waits for a parameter's gradient, which a captured step would not call.

    Args:
        fqn: of the parameter.
        parameter: the parameter.

    Raises:
        CaptureError: there is one.
    """
    if find_gradient_hooks([parameter]) is not None:
        raise CaptureError(
            f"a hook on parameter {fqn!r} waits for its gradient (register_hook, register_post_accumulate_grad_hook, "
            "an optimizer in backward); a captured step calls none. Remove it, and do after the step what it does"
        )


def _modules(model: nn.Module) -> list[nn.Module]:
    """Returns what ``[*model.modules()]`` does, in a third of its time: each call asks."""
    found: dict[nn.Module, None] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            if children := vars(module)["_modules"]:
                pending += [child for child in reversed(children.values()) if child is not None]
    return [*found]


_NONE = torch.empty(0)


def _kinds(tensors: Sequence[torch.Tensor | None]) -> tuple[list[Any], ...]:
    """Returns dtypes, devices and shapes; as three lists, since each call of a step compares them."""
    there = [_NONE if tensor is None else tensor for tensor in tensors]
    return [t.dtype for t in there], [t.device for t in there], [t.shape for t in there]


def _first(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Returns for each tensor the first position at which it is; for None -1."""
    seen = {id(None): -1}
    return [seen.setdefault(id(tensor), slot) for slot, tensor in enumerate(tensors)]
