"""Second names are found, hidden and given back, wherever they are."""

from __future__ import annotations

import pytest
from torch import nn

from graphpasses.embedding.table_names import find_aliases, give_names, one_name_each
from graphpasses.identity import walk_modules


class Table(nn.Module):
    """A module that counts as tables."""


def is_table(module: nn.Module) -> bool:
    return isinstance(module, Table)


def shared() -> nn.Module:
    """``b`` is ``a`` and holds a table, which is also its own second child; ``dense`` and ``copy`` hold none."""
    table = Table()
    model = nn.Module()
    model.a = nn.ModuleList([table, table])
    model.dense = nn.ModuleList([nn.Linear(1, 1)])
    model.b = model.a
    model.copy = model.dense
    model.last = nn.Sequential(table, nn.ReLU())
    return model


def names(model: nn.Module) -> list[str]:
    return [fqn for fqn, _ in walk_modules(model)]


def test_aliases() -> None:
    aliases = find_aliases(shared(), is_table)
    assert [(alias.fqn, alias.canonical) for alias in aliases] == [("a.1", "a.0"), ("b", "a"), ("last.0", "a.0")]


def test_nothing_is_shared() -> None:
    model = nn.ModuleList([Table(), Table(), nn.Linear(1, 1)])
    assert find_aliases(model, is_table) == []
    with one_name_each(model, is_table) as aliases:
        assert aliases == []
        assert len(model) == 3


def test_a_module_that_points_back() -> None:
    model = nn.Module()
    model.child = nn.ModuleList([Table()])
    model.child.parent = model
    assert [(alias.fqn, alias.canonical) for alias in find_aliases(model, is_table)] == [("child.parent", "")]
    with one_name_each(model, is_table):
        assert names(model) == ["", "child", "child.0"]
    assert model.child.parent is model


def test_hidden_and_given_back_in_order() -> None:
    model = shared()
    before, parts = names(model), list(model._modules)
    new = Table()
    with one_name_each(model, is_table):
        assert names(model) == ["", "a", "a.0", "dense", "dense.0", "copy", "copy.0", "last", "last.1"]
        model.a[0] = new
        model.added = nn.ReLU()
    assert [name for name in names(model) if name != "added"] == before
    assert list(model._modules) == [*parts, "added"]
    assert model.a[0] is model.a[1] is model.b[0] is model.last[0] is new


def test_given_back_after_an_error() -> None:
    model = shared()
    before = dict(walk_modules(model))
    with pytest.raises(KeyError), one_name_each(model, is_table):
        raise KeyError
    assert dict(walk_modules(model)) == before


def test_a_copy_gets_them() -> None:
    model, copy = shared(), shared()
    for parent, name in ((copy.a, "1"), (copy, "b"), (copy.last, "0")):
        del parent._modules[name]
    give_names(find_aliases(model, is_table), copy)
    assert names(copy) == names(model)
    assert copy.a[0] is copy.a[1] is copy.b[0] is copy.last[0] is not model.a[0]
