"""Which names of a model are the same module, parameter or buffer, and how to keep, or put back, what is the same.

A tied weight has several fully qualified names (FQNs). Eager gathers, updates and reduces it once, so every
part of graphpasses speaks of it by one name: the canonical one, which is the first that
``named_modules/named_parameters/named_buffers(remove_duplicate=False)`` gives it.
"""

from __future__ import annotations

import builtins
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphpasses.errors import IdentityError
from graphpasses.text import did_you_mean

Aliases = tuple[tuple[str, ...], ...]

# Attributes in which torch's wrappers keep the module that they wrap: activation checkpointing, torch.compile.
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(frozen=True, repr=False)
class IdentityMap:
    """All names of every module, parameter and buffer of a model, by object identity.

    It holds names only, so it neither keeps the model alive nor follows it: make a new one when ties change.

    Args:
        modules: per module all its FQNs, the canonical one first; in first-seen order. The root is ``""``.
        parameters: likewise for parameters.
        buffers: likewise for buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> model[1].weight = model[0].weight
        >>> identity = IdentityMap.of(model)
        >>> identity.canonical("1.weight")
        '0.weight'
        >>> identity.shared_parameters
        {'0.weight': ('0.weight', '1.weight')}
    """

    modules: Aliases
    parameters: Aliases
    buffers: Aliases

    @classmethod
    def of(cls, model: nn.Module) -> IdentityMap:
        """Reads the names of a model.

        A name that passes through one module twice (a child that points back to its parent) is left out.

        Args:
            model: any module, on any device, meta included.
        """
        modules: list[tuple[str, object]] = []
        parameters: list[tuple[str, object]] = []
        buffers: list[tuple[str, object]] = []
        for module_fqn, module in walk_modules(model):
            modules.append((module_fqn, module))
            parameters += _members(module_fqn, module._parameters)
            buffers += _members(module_fqn, module._buffers)
        return cls(_group(modules), _group(parameters), _group(buffers))

    def canonical(self, fqn: str) -> str:
        """Returns the first-seen name of the object that ``fqn`` names.

        Raises:
            IdentityError: the model has no such module, parameter or buffer.
        """
        return self.aliases(fqn)[0]

    def aliases(self, fqn: str) -> tuple[str, ...]:
        """Returns all names of the object that ``fqn`` names, the canonical one first.

        Raises:
            IdentityError: the model has no such module, parameter or buffer.
        """
        try:
            return self._aliases_by_name[fqn]
        except KeyError:
            raise IdentityError(
                f"the model has no module, parameter or buffer {fqn!r}"
                + did_you_mean(fqn, self._aliases_by_name.keys())
            ) from None

    @property
    def shared_modules(self) -> dict[str, tuple[str, ...]]:
        """Canonical FQN -> all FQNs, of each module with more than one."""
        return _shared(self.modules)

    @property
    def shared_parameters(self) -> dict[str, tuple[str, ...]]:
        """Canonical FQN -> all FQNs, of each parameter with more than one: tied, or in a shared module."""
        return _shared(self.parameters)

    @property
    def shared_buffers(self) -> dict[str, tuple[str, ...]]:
        """Canonical FQN -> all FQNs, of each buffer with more than one."""
        return _shared(self.buffers)

    @cached_property
    def _aliases_by_name(self) -> dict[str, tuple[str, ...]]:
        groups = self.modules + self.parameters + self.buffers
        return {name: aliases for aliases in groups for name in aliases}

    def __repr__(self) -> str:
        kinds = [
            f"{kind}={len(groups)} ({len(_shared(groups))} shared)"
            for kind, groups in (
                ("modules", self.modules),
                ("parameters", self.parameters),
                ("buffers", self.buffers),
            )
        ]
        return f"IdentityMap({', '.join(kinds)})"


@contextmanager
def preserve_identity(model: nn.Module, *, check_values: bool = False) -> Iterator[IdentityMap]:
    """Restores the ties and the ``requires_grad`` of a model that the block transforms.

    torchtitan's SimpleFSDP ``data_parallel``, ``to_empty`` and sharding planners treat each name on its own:
    they leave one new object per name where there was one object, and ``data_parallel`` makes frozen
    parameters trainable. When the block ends every name is again the object at the canonical name. **The
    canonical name's value wins.** Values are not compared unless asked for, since after ``to_empty`` they are
    uninitialised memory; initialise after the block. If the block raises, nothing is restored.

    Args:
        model: the model, transformed in place by the block.
        check_values: also refuse tied copies whose bits differ. Shards are compared on their own rank without
            communication, so one rank alone may raise; tensors on the meta device are not compared.

    Yields:
        The names as they were before the block.

    Raises:
        IdentityError: a tie cannot be restored: one of its names vanished, shape, dtype, device or placements
            differ, or two names of a shared module now have different classes. The model stays as the block
            left it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
        >>> model[1].weight = model[0].weight
        >>> with preserve_identity(model):
        ...     model = model.to_empty(device="cpu")
        >>> model[1].weight is model[0].weight
        True
    """
    identity = IdentityMap.of(model)
    modules = dict(walk_modules(model))
    # Weak, so that the block can free the modules that it replaces.
    originals = {name: weakref.ref(modules[name]) for aliases in identity.shared_modules.values() for name in aliases}
    requires_grad = {fqn: parameter.requires_grad for fqn, parameter in model.named_parameters()}
    del modules
    yield identity

    problems: list[str] = []
    modules_back = _plan_modules(model, identity, originals, problems)
    # What is below a module that the block left alone under this name goes away with it.
    skip = tuple(f"{a}." for a in modules_back if _find_module(model, a) is originals[a]())
    tensors_back = _plan_tensors(model, identity, skip, check_values, problems)
    if problems:
        raise IdentityError("the block broke ties that cannot be restored:\n  " + "\n  ".join(problems))

    for alias, module in modules_back.items():
        owner, name = _owner(model, alias)
        owner._modules[name] = module
    for alias, tensor in tensors_back.items():
        owner, name = _owner(model, alias)
        # Not setattr: SimpleFSDP gives the classes read-only properties of the same names.
        if isinstance(tensor, nn.Parameter):
            owner._parameters[name] = tensor
        else:
            owner._buffers[name] = tensor
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad != requires_grad.get(fqn, parameter.requires_grad):
            parameter.requires_grad_(requires_grad[fqn])


def walk_modules(
    model: nn.Module, *, is_leaf: Callable[[nn.Module], bool] = lambda module: False
) -> Iterator[tuple[str, nn.Module]]:
    """Yields what ``named_modules(remove_duplicate=False)`` does, but no cycles, and nothing inside of leaves."""
    path: set[nn.Module] = set()

    def visit(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in path:
            return
        yield fqn, module
        if is_leaf(module):
            return
        path.add(module)
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(f"{fqn}.{name}" if fqn else name, child)
        path.remove(module)

    return visit("", model)


def named_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns a model's parameters, and then its buffers, each under all of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def find_state(model: nn.Module, fqn: str) -> torch.Tensor | None:
    """Returns the parameter or buffer that ``model`` stores under ``fqn``, past any parametrization, or None."""
    owner_fqn, _, name = fqn.rpartition(".")
    owner = _find_module(model, owner_fqn)
    if owner is None:
        return None
    parameter = owner._parameters.get(name)
    return parameter if parameter is not None else owner._buffers.get(name)


def _members(module_fqn: str, members: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, member in members.items():
        if member is not None:
            yield f"{module_fqn}.{name}" if module_fqn else name, member


def _group(members: Iterable[tuple[str, object]]) -> Aliases:
    names: dict[int, list[str]] = {}
    for name, member in members:
        names.setdefault(id(member), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values())


def _shared(groups: Aliases) -> dict[str, tuple[str, ...]]:
    return {aliases[0]: aliases for aliases in groups if len(aliases) > 1}


def _owner(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner_fqn, _, name = fqn.rpartition(".")
    owner = _find_module(model, owner_fqn)
    assert owner is not None
    return owner, name


def _find_module(model: nn.Module, fqn: str) -> nn.Module | None:
    module: nn.Module | None = model
    for name in fqn.split(".") if fqn else ():
        module = module._modules.get(name) if module is not None else None
    return module


def _plan_modules(
    model: nn.Module,
    identity: IdentityMap,
    originals: Mapping[str, weakref.ref[nn.Module]],
    problems: list[str],
) -> dict[str, nn.Module]:
    """Returns for each name that must point to another module that module, outermost names first."""
    planned: dict[str, nn.Module] = {}
    for canonical, aliases in identity.shared_modules.items():
        module = _find_module(model, canonical)
        for alias in aliases[1:]:
            if any(alias.startswith(f"{outer}.") for outer in planned):
                continue  # it comes back with the module around it
            other = _find_module(model, alias)
            if module is None or other is None:
                gone = canonical if module is None else alias
                problems.append(f"modules {canonical!r} and {alias!r} were one: {gone!r} vanished")
            elif other is module:
                continue
            elif other is originals[alias]() or type(other) is type(module):
                planned[alias] = module
            else:
                problems.append(
                    f"modules {canonical!r} and {alias!r} were one: "
                    f"now they are {type(module).__name__} and {type(other).__name__}"
                )
    return planned


def _plan_tensors(
    model: nn.Module, identity: IdentityMap, skip: tuple[str, ...], check_values: bool, problems: list[str]
) -> dict[str, torch.Tensor]:
    """Returns for each name that must point to another parameter or buffer that tensor."""
    planned: dict[str, torch.Tensor] = {}
    for canonical, aliases in (identity.shared_parameters | identity.shared_buffers).items():
        tensor = find_state(model, canonical)
        for alias in aliases[1:]:
            if alias.startswith(skip):
                continue
            other = find_state(model, alias)
            if tensor is None or other is None:
                problem = f"{(canonical if tensor is None else alias)!r} vanished"
            elif other is tensor:
                continue
            else:
                problem = _difference(tensor, other, check_values)
                planned[alias] = tensor
            if problem:
                problems.append(f"{canonical!r} and {alias!r} were tied: {problem}")
    return planned


def _difference(a: torch.Tensor, b: torch.Tensor, check_values: bool) -> str:
    """Says why two tensors cannot be one again; empty if they can."""
    facts_a, facts_b = _facts(a), _facts(b)
    for fact, value in facts_a.items():
        if value != facts_b[fact]:
            return f"{fact} is {value} and {facts_b[fact]}"
    if check_values and a.device.type != "meta" and not same_bits(a, b):
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return "values differ" + (f" on rank {torch.distributed.get_rank()}" if distributed else "")
    return ""


def _facts(tensor: torch.Tensor) -> dict[str, object]:
    return {
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "class": type(tensor).__name__,
        # Of a DTensor; asked for by name, since importing it takes seconds.
        "device mesh": getattr(tensor, "device_mesh", None),
        "placements": getattr(tensor, "placements", None),
    }


RESTORED = (list, deque, dict, defaultdict, OrderedDict, Counter, set)
"""Containers whose items are put back; not the user's classes, which may do something else."""
_OPENED = frozenset({*RESTORED, tuple})
MAX_ITEMS = 1000
"""Of containers in containers, all together, that are looked at: data sets are longer."""


@contextmanager
def attributes_restored(objects: Iterable[Any]) -> Iterator[None]:
    """Gives objects back their attributes after the block, and lists, dicts and sets among these their items.

    What a DistributedDataParallel notes of its reducer, which goes on, stays.
    """
    others = [each for each in objects if not isinstance(each, nn.parallel.DistributedDataParallel)]
    held = [each for thing in others for each in (vars(thing), *vars(thing).values())]
    before = [pair for each in held for pair in containers_with_copies(each)]
    try:
        yield
    finally:
        for value, items in before:
            put_back(value, items)


def containers_with_copies(value: Any) -> list[tuple[Any, Any]]:
    """Returns the lists, deques, dicts and sets that a value is, or holds, with copies; of many items not all."""
    found: dict[int, tuple[Any, Any]] = {}
    pending, left = [value] if type(value) in _OPENED else [], MAX_ITEMS
    while pending:
        each = pending.pop()
        if type(each) not in _OPENED or id(each) in found or each is vars(builtins):
            continue
        found[id(each)] = each, each if type(each) is tuple else each.copy()
        if (left := left - len(each)) >= 0:
            pending += each.values() if isinstance(each, dict) else each
    return [pair for pair in found.values() if type(pair[0]) is not tuple]


def put_back(value: Any, items: Any) -> None:
    """Gives a list, deque, dict or set the items that a copy of it has, if it has others."""
    if has_other_items(value, items):
        value.clear()
        value.extend(items) if isinstance(value, (list, deque)) else value.update(items)


def has_other_items(value: Any, items: Any) -> bool:
    """Whether a list, deque, dict or set has other objects than a copy of it."""
    return _ids(value) != _ids(items)


def _ids(value: Any) -> list[int]:
    return [*map(id, value), *map(id, value.values() if isinstance(value, dict) else ())]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype and shape, and equal bytes (NaN equals itself); of DTensors local shards."""
    x, y = (t.to_local() if hasattr(t, "to_local") else t for t in (a.detach(), b.detach()))
    if (x.dtype, x.shape, x.layout) != (y.dtype, y.shape, y.layout):
        return False
    if x.layout is not torch.strided:
        x, y = (t.to_sparse_coo().coalesce() for t in (x, y))
        return same_bits(x.indices(), y.indices()) and same_bits(x.values(), y.values())
    return torch.equal(*(t.to(x.device).resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (x, y)))


def unwrapped_name(fqn: str) -> str:
    """Returns the name that a parameter or buffer has in checkpoints, where torch's wrappers have no part in it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPED)
