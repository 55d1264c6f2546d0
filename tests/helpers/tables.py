"""FBGEMM's table modules, and models that look up in several of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")  # its presence is what makes graphpasses trace FBGEMM's operators
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

import graphpasses
from graphpasses.capture.compile_report import CompileReport
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import FuseTBE
from graphpasses.passes.runner import GraphPass, Numerics, PassReport, Pipeline

NUM_ROWS = 20
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}
BOUNDS_CHECKS = {"warning": BoundsCheckMode.WARNING, "fatal": BoundsCheckMode.FATAL}


def tables(
    dims: Sequence[int],
    optimizer: str = "sgd",
    pooling: str = "sum",
    *,
    features: Sequence[int] | None = None,
    rate: float = 0.1,
    is_half: bool = False,
) -> nn.Module:
    """Returns one module of tables with 20, 21, … rows.

    Args:
        dims: embedding dimension of each table.
        optimizer: ``"sgd"``, ``"adagrad"`` or ``"rowwise_adagrad"``.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        features: number of the table of each feature; by default each table has one.
        rate: learning rate.
        is_half: whether weights are float16.
    """
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS + i, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for i, dim in enumerate(dims)],
        feature_table_map=None if features is None else list(features),
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=rate,
        eps=1e-3,
        pooling_mode=POOLING[pooling],
        weights_precision=SparseType.FP16 if is_half else SparseType.FP32,
        device=torch.device("cpu"),
    )
    module.init_embedding_weights_uniform(-1.0, 1.0)
    return module


Bags = tuple[Tensor, Tensor, Tensor | None]


def bags(num_features: int, seed: int, batch_size: int = 5, *, is_weighted: bool = False) -> Bags:
    """Returns ids, offsets and weights of bags of 0 to 3 ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (num_features * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_ids = int(offsets[-1])
    ids = torch.randint(0, NUM_ROWS, (num_ids,), generator=generator)
    weights = torch.rand(num_ids, generator=generator).requires_grad_() if is_weighted else None
    return ids, offsets, weights


class Lookups(nn.Module):
    """The sum of a function of what several modules of tables return."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def num_features(self) -> list[int]:
        return [module.D_offsets.numel() - 1 for module in self.tables]

    def batch(self, seed: int, **options: Any) -> list[Bags]:
        return [bags(number, 100 * seed + i, **options) for i, number in enumerate(self.num_features())]

    def forward(self, batch: Sequence[Bags]) -> Tensor:
        outputs = [module(*inputs) for module, inputs in zip(self.tables, batch, strict=True)]
        return sum((output * self.scale).sin().sum() for output in outputs)


@dataclass(frozen=True)
class Look(GraphPass):
    """Keeps the graphs that it sees."""

    name: ClassVar[str] = "look"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.DYNAMO})
    seen: list[TrainGraph] = field(default_factory=list, compare=False, repr=False)

    def rewrite(self, graph: TrainGraph) -> int:
        self.seen.append(graph.copy())
        return 0


def model_graph(model: nn.Module, *inputs: Any) -> TrainGraph:
    """Returns the ``DYNAMO`` graph of a model; by default of :class:`Lookups` and a batch."""
    look = Look()
    torch.compiler.reset()
    graphpasses.compile(model, pipeline=Pipeline((look,)), inner="aot_eager", fullgraph=True)(
        *(inputs or (model.batch(0),))
    )
    (graph,) = look.seen
    return graph


# ---- eager and fused, side by side ----

PIPELINE = Pipeline((FuseTBE(),))


class Compiled:
    """A compiled model, and what the pass did to each of its graphs; tests/proof has what is proved of it."""

    def __init__(self, model: nn.Module) -> None:
        torch.compiler.reset()
        self.report = CompileReport()
        self.call = graphpasses.compile(
            model, pipeline=PIPELINE, inner="aot_eager", fullgraph=True, report=self.report, prove=False
        )

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    @property
    def passes(self) -> list[PassReport]:
        return [report["fuse-tbe"] for _, _, report in self.report.stages]


def state(model: nn.Module) -> list[Tensor]:
    """Returns copies of all weights, optimizer states and gradients."""
    values = [*model.parameters(), *model.buffers()]
    return [value.detach().clone() for value in values + [p.grad for p in values if p.grad is not None]]


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def step(call: Callable[..., Tensor], model: nn.Module, batch: Sequence[Bags]) -> list[Tensor]:
    """Returns the loss, the gradients of the weights of ids, and the model's state behind a step."""
    loss = call(batch)
    loss.backward()
    return [loss.detach(), *(weights.grad for *_, weights in batch if weights is not None), *state(model)]


@dataclass
class Pair:
    """A model that runs eagerly, the reference, and an equal one that is compiled."""

    eager: nn.Module
    model: nn.Module
    compiled: Compiled

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> Pair:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(build())
        return cls(*models, Compiled(models[1]))

    def step(self, seed: int, **options: Any) -> None:
        """Trains both one step and compares them."""
        batches = [self.eager.batch(seed, **options) for _ in range(2)]
        expected = step(self.eager, self.eager, batches[0])
        assert_same(step(self.compiled, self.model, batches[1]), expected)
