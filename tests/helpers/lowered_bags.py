"""Plain embedding bags in eager, and the same ones compiled and lowered to FBGEMM's TBE."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")  # its presence is what makes graphpasses trace FBGEMM's operators
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import graphpasses
from graphpasses.capture.compile_report import CompileReport
from graphpasses.graph import Stage
from graphpasses.passes import LowerEmbeddingBags
from graphpasses.passes.runner import GraphPass, Pipeline
from tests.helpers.kept import Keep

NUM_ROWS, DIM, BATCH_SIZE = 40, 4, 3
SGD, ADAGRAD = torch.optim.SGD, torch.optim.Adagrad
NAME = LowerEmbeddingBags.name
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@dataclass(frozen=True)
class KeepDynamo(Keep):
    """Runs at no other stage, whose reports would then be the last."""

    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.DYNAMO})
    kept: tuple[Stage, ...] = (Stage.DYNAMO,)


class Bags(nn.Module):
    """Tables of several widths, each looked up once."""

    def __init__(self, num_tables: int = 3, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM * (index + 1), **options) for index in range(num_tables)
        )

    def forward(self, batch: list[tuple[Tensor | None, ...]]) -> Tensor:
        return torch.cat([bag(*args) for bag, args in zip(self.bags, batch, strict=True)], 1)


class Twice(nn.Module):
    """One table, looked up twice."""

    def __init__(self, look_up: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.other = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.look_up = look_up

    def forward(self, *args: Tensor) -> Tensor:
        return self.look_up(self, *args)


def ids_of(step: int, num_ids: int = 7, distinct: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if distinct:
        return torch.randperm(NUM_ROWS, generator=generator)[:num_ids]
    return torch.randint(NUM_ROWS // 8, (num_ids,), generator=generator)


def batch_of(step: int, num_tables: int = 3, *, distinct: bool = True, weighted: bool = False) -> list[Any]:
    """One empty bag among three; another number of ids in each table and step."""
    sizes = [5 + step + index for index in range(num_tables)]
    ids = [ids_of(10 * step + size, size, distinct) for size in sizes]
    weights = [torch.linspace(-1, 1, size) if weighted else None for size in sizes]
    return [(part, torch.tensor([0, 2, 2]), weight) for part, weight in zip(ids, weights, strict=True)]


class Pair:
    """A model in eager, and the same one compiled with its bags lowered."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *others: GraphPass,
        inner: Any = "aot_eager",
        **options: Any,
    ) -> None:
        self.eager, self.model = copy.deepcopy(model), model
        if optimizer is not None:
            for parameters in (self.eager.parameters(), self.model.parameters()):
                apply_optimizer_in_backward(optimizer, parameters, {"lr": 0.1} | options)
        self.report, self.keep = CompileReport(), KeepDynamo()
        pipeline = Pipeline((LowerEmbeddingBags(), *others, self.keep))
        self.compiled = graphpasses.compile(
            self.model, pipeline=pipeline, inner=inner, report=self.report, fullgraph=True
        )

    def step(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Runs a step of both; returns what they returned."""
        outputs = self.eager(*args), self.compiled(*args)
        for output in outputs:
            output.square().sum().backward()
        return outputs

    def tables(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.eager.parameters(), self.model.parameters(), strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        (*_, (_, _, report)) = self.report.stages
        return report[NAME].notes

    @property
    def num_rewrites(self) -> int:
        (*_, (_, _, report)) = self.report.stages
        return report[NAME].num_rewrites

    def lookups(self) -> list[str]:
        """Names of the lookup operators in the last graph."""
        names = [str(node.target) for node in self.keep.graphs[-1].graph.nodes]
        return [name.split(".")[1] for name in names if name.startswith("fbgemm.") and "lookup" in name]


def state(parameter: Tensor, name: str) -> Tensor:
    return parameter._in_backward_optimizers[0].state[parameter][name]
