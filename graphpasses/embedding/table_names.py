"""Second names of modules that hold tables, and how to hide them from code that takes each name for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Alias:
    """A second name of a module that is a table's or holds one."""

    fqn: str  # the name; that of the module it is in is a first one
    canonical: str  # the module's first name, in the order of ``named_modules()``
    place: tuple[nn.Module, str]  # the module that it is in, and the name there
    canonical_place: tuple[nn.Module, str]  # the same for the first name
    # All names in the module that it is in, in order, which means something in ``nn.Sequential``.
    siblings: tuple[str, ...]


def find_aliases(model: nn.Module, is_table: Callable[[nn.Module], bool]) -> list[Alias]:
    """Returns all second names of modules that hold tables; of what is in a shared container, the container's."""
    places: dict[nn.Module, tuple[str, tuple[nn.Module, str]]] = {}
    seconds: list[tuple[str, nn.Module, str, nn.Module]] = []
    holders: set[nn.Module] = set()

    def visit(fqn: str, module: nn.Module, place: tuple[nn.Module, str]) -> None:
        places[module] = fqn, place
        if is_table(module):
            holders.add(module)
            return
        for name, child in module._modules.items():
            if child is None:
                continue
            child_fqn = f"{fqn}.{name}" if fqn else name
            if child in places:
                seconds.append((child_fqn, module, name, child))
            else:
                visit(child_fqn, child, (module, name))
            if child in holders:
                holders.add(module)

    visit("", model, (model, ""))
    return [
        Alias(fqn, places[child][0], (module, name), places[child][1], tuple(module._modules))
        for fqn, module, name, child in seconds
        if child in holders
    ]


@contextmanager
def one_name_each(model: nn.Module, is_table: Callable[[nn.Module], bool]) -> Iterator[list[Alias]]:
    """Hides second names in a block, and gives them to the modules that have the first names at its end."""
    aliases = find_aliases(model, is_table)
    for parent, name in (alias.place for alias in aliases):
        del parent._modules[name]
    try:
        yield aliases
    finally:
        give_names(aliases)


def give_names(aliases: list[Alias], *, copied_to: nn.Module | None = None) -> None:
    """Gives second names to the modules that have the first ones, in the model or in a copy of it."""
    siblings: dict[nn.Module, tuple[str, ...]] = {}
    for alias in aliases:
        (parent, name), (owner, first_name) = alias.place, alias.canonical_place
        if copied_to is not None:
            parent = copied_to.get_submodule(alias.fqn.rpartition(".")[0])
            owner = copied_to.get_submodule(alias.canonical.rpartition(".")[0])
        parent._modules[name] = owner._modules[first_name] if first_name else owner
        siblings[parent] = alias.siblings
    for parent, names in siblings.items():
        modules = dict(parent._modules)
        parent._modules.clear()
        parent._modules.update({name: modules.pop(name) for name in names if name in modules} | modules)
