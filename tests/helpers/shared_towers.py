"""Models in which one collection of tables has two names, in each way that users write it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

pytest.importorskip("torchrec")
import tests.helpers.recommenders  # noqa: F401  loads TorchRec's operators without its warnings  # isort: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

__all__ = [
    "PATTERNS",
    "SAME_PARENT",
    "FusedEmbeddingBagCollection",
    "KeyedJaggedTensor",
    "Pattern",
    "Tower",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TwoTowers",
    "same_parent",
    "two_parents",
    "wrapper",
]

Pattern = Callable[["TwoTowers", nn.Module], tuple[str, str]]


class Tower(nn.Module):
    """What a user wraps around an embedding collection."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


class TwoTowers(nn.Module):
    """Scores what a shared collection returns for two batches of ids, one under each name.

    Args:
        pattern: gives the collection to the model; returns under which names to call it.
        ebc: the collection.
        width: of what it returns.
    """

    def __init__(self, pattern: Pattern, ebc: nn.Module, width: int) -> None:
        super().__init__()
        self.names = pattern(self, ebc)
        self.score = nn.Linear(width, 1)

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return (self.score(first(user).values()) - self.score(second(item).values())).square().mean()


def same_parent(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.user = model.item = ebc
    return "user", "item"


def two_parents(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.user, model.item = Tower(ebc), Tower(ebc)
    return "user.ebc", "item.ebc"


def module_list(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.towers = nn.ModuleList([ebc, ebc])
    return "towers.0", "towers.1"


def module_dict(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.towers = nn.ModuleDict({"user": Tower(ebc), "item": ebc})
    return "towers.user.ebc", "towers.item"


def container(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.user = model.item = nn.ModuleDict({"tables": ebc})
    return "user.tables", "item.tables"


def wrapper(model: nn.Module, ebc: nn.Module) -> tuple[str, str]:
    model.ebc, model.tower = ebc, Tower(ebc)
    return "ebc", "tower"


PATTERNS: tuple[Pattern, ...] = (same_parent, two_parents, module_list, module_dict, container, wrapper)
SAME_PARENT = (same_parent, module_list, container)  # where TorchRec leaves the second name unsharded
