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
    # All names in the module that it is in, in order, which means something in ``nn.Sequential``.
    siblings: tuple[str, ...]


def find_aliases(model: nn.Module, is_table: Callable[[nn.Module], bool]) -> list[Alias]:
    """Returns all second names of modules that hold tables; of what is in a shared container, the container's."""
    first_names: dict[nn.Module, str] = {}
    seconds: list[tuple[nn.Module, Alias]] = []

    def visit(fqn: str, module: nn.Module) -> None:
        first_names[module] = fqn
        for name, child in module._modules.items() if not is_table(module) else ():
            child_fqn = f"{fqn}.{name}" if fqn else name
            if child in first_names:
                seconds.append((child, Alias(child_fqn, first_names[child], tuple(module._modules))))
            elif child is not None:
                visit(child_fqn, child)

    visit("", model)
    return [alias for child, alias in seconds if any(map(is_table, child.modules()))]


@contextmanager
def one_name_each(model: nn.Module, is_table: Callable[[nn.Module], bool]) -> Iterator[list[Alias]]:
    """Hides second names in a block, and gives them to the modules that have the first names at its end."""
    aliases = find_aliases(model, is_table)
    for alias in aliases:
        parent, _, name = alias.fqn.rpartition(".")
        del model.get_submodule(parent)._modules[name]
    try:
        yield aliases
    finally:
        give_names(aliases, model)


def give_names(aliases: list[Alias], model: nn.Module) -> None:
    """Gives second names to the modules that have the first ones, in the model in which they were found or a copy."""
    for alias in aliases:
        parent, _, name = alias.fqn.rpartition(".")
        modules = model.get_submodule(parent)._modules
        others = modules | {name: model.get_submodule(alias.canonical)}
        modules.clear()
        modules.update({name: others.pop(name) for name in alias.siblings if name in others} | others)
