"""Small sharded recommenders and their batches, and steps of them in eager and compiled."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
        PoolingType,
    )
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
    from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

import graphpasses
from graphpasses.capture.compile_report import CompileReport

DIM, NUM_ROWS, BATCH_SIZE = 16, 40, 5
CPU = torch.device("cpu")


def bags(
    num_tables: int,
    prefix: str = "",
    dim: int = DIM,
    poolings: Sequence[Any] = (PoolingType.SUM,),
    **options: Any,
) -> nn.Module:
    """Returns an EmbeddingBagCollection of tables ``<prefix>t0`` on features ``<prefix>f0``."""
    tables = [
        EmbeddingBagConfig(
            name=f"{prefix}t{index}",
            feature_names=[f"{prefix}f{index}"],
            num_embeddings=NUM_ROWS,
            embedding_dim=dim,
            pooling=poolings[index % len(poolings)],
        )
        for index in range(num_tables)
    ]
    return EmbeddingBagCollection(tables, device=CPU, **options)


def sequences(num_tables: int) -> nn.Module:
    """Returns an EmbeddingCollection of tables ``t0`` on features ``f0``."""
    tables = [
        EmbeddingConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=NUM_ROWS, embedding_dim=DIM)
        for index in range(num_tables)
    ]
    return EmbeddingCollection(tables, device=CPU)


def ids(
    rank: int,
    step: int,
    num_features: int,
    prefix: str = "",
    *,
    batch_size: int = BATCH_SIZE,
    is_weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Returns a batch with empty bags; rank 1 has none but empty ones in step 1, rank 0 one id in step 2."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (num_features * batch_size,), generator=generator)
    if (rank, step) == (1, 1):
        lengths.zero_()
    if (rank, step) == (0, 2):
        lengths.zero_()[-1] = 1
    num_ids = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=[f"{prefix}f{index}" for index in range(num_features)],
        values=torch.randint(0, NUM_ROWS, (num_ids,), generator=generator).to(dtype),
        lengths=lengths.to(dtype),
        weights=torch.rand(num_ids, generator=generator) if is_weighted else None,
    )


def batch_sizes_per_feature(rank: int, step: int) -> KeyedJaggedTensor:
    """Returns a batch of two features, each with a row per distinct sample."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randint(1, BATCH_SIZE, (2,), generator=generator).tolist()
    lengths = torch.randint(0, 3, (sum(sizes),), generator=generator)
    keys = ["f0", "f1"]
    inverse = [torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in sizes]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(keys, torch.stack(inverse)),
    )


class Scored(nn.Module):
    """The mean score of what an embedding module returns."""

    def __init__(self, embeddings: nn.Module, width: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.is_pooled = not isinstance(embeddings, EmbeddingCollection)
        self.score = nn.Linear(width, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out = self.embeddings(features)
        if self.is_pooled:
            return self.score(out.values()).mean()
        return torch.stack([self.score(jagged.values()).sum() for jagged in out.values()]).sum()


@dataclass
class Case:
    """A model, how each of its tables is sharded, and its batches."""

    build: Callable[[], nn.Module]
    shardings: Sequence[Callable[..., Any]]
    batch: Callable[[int, int], tuple[Any, ...]]
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    wrapper: DataParallelWrapper | None = None
    num_local_ranks: int | None = None
    num_steps: int = 4
    max_graphs: int = 1
    sharders: Sequence[Any] | None = None

    def sharded(self) -> nn.Module:
        """Returns the model, from one seed, sharded over all ranks."""
        torch.manual_seed(0)
        model = self.build()
        num_ranks = dist.get_world_size()
        num_local_ranks = self.num_local_ranks or num_ranks
        os.environ["LOCAL_WORLD_SIZE"] = str(num_local_ranks)
        plan = {}
        shardings = itertools.cycle(self.shardings)
        for name, collection in _collections(model):
            inner = getattr(collection, "_embedding_bag_collection", collection)
            apply_optimizer_in_backward(self.optimizer, inner.parameters(), {"lr": 0.1})
            is_bags = isinstance(inner, EmbeddingBagCollection)
            configs = inner.embedding_bag_configs() if is_bags else inner.embedding_configs()
            plan[name] = plans.construct_module_sharding_plan(
                collection,
                {config.name: next(shardings) for config in configs},
                local_size=num_local_ranks,
                world_size=num_ranks,
                device_type="cpu",
            )
        return DistributedModelParallel(
            model,
            ShardingEnv.from_process_group(dist.group.WORLD),
            CPU,
            ShardingPlan(plan),
            None if self.sharders is None else list(self.sharders),
            data_parallel_wrapper=self.wrapper,
        )


def _collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    processed: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, FeatureProcessedEmbeddingBagCollection):
            processed.add(module._embedding_bag_collection)
            yield name, module
        elif isinstance(module, EmbeddingBagCollection | EmbeddingCollection) and module not in processed:
            yield name, module


class Compiled:
    """A model compiled as users do, but for the proof, an eighth of the time: its bits are compared.

    ``backend`` counts its graphs.
    """

    def __init__(self, model: nn.Module, *, prove: bool | None = False, **options: Any) -> None:
        torch.compiler.reset()
        self.model, self.backend = model, CompileReport()
        options = {"inner": "aot_eager", "fullgraph": True, "report": self.backend, "prove": prove} | options
        self.call = graphpasses.compile(model, **options)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def tbes(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the table-batched embeddings of a sharded model."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            yield from (child for child in lookup.modules() if hasattr(child, "iter_cpu"))


def tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the local tensors of a state dict."""
    if isinstance(state, ShardedTensor):
        for index, shard in enumerate(state.local_shards()):
            yield f"{prefix}#{index}", shard.tensor
    elif isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from tensors(value, f"{prefix}.{name}")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a sharded model's weights, gradients and fused optimizers' states on this rank."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    state = {
        "weights": model.state_dict(),
        "gradients": {name: parameter.grad for name, parameter in dense.items()},
        "optimizer": model.fused_optimizer.state_dict()["state"],
    }
    return {name: tensor.detach().clone() for name, tensor in tensors(state)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit by bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def differences(case: Case, compile: Callable[[nn.Module], Any] = Compiled) -> list[str]:
    """Trains a model twice, eager and compiled, on all ranks; returns what differs on this rank."""
    eager, model = case.sharded(), case.sharded()
    compiled = compile(model)
    sgd = [
        torch.optim.SGD([p for _, p in in_backward_optimizer_filter(m.named_parameters())], lr=0.1)
        for m in (eager, model)
    ]
    start = state_of(eager)
    found = []
    for step in range(case.num_steps):
        losses = []
        for call, optimizer in zip((eager, compiled), sgd, strict=True):
            loss = call(*case.batch(dist.get_rank(), step))
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        if not torch.equal(*losses):
            found.append(f"step {step}: loss {losses[0]} in eager, {losses[1]} compiled")
        states = state_of(eager), state_of(model)
        if not same(*states):
            names = [
                n for n, value in states[0].items() if n not in states[1] or not torch.equal(value, states[1][n])
            ]
            found.append(f"step {step}: {names or 'other names'}")
    if same(start, state_of(eager)):
        found.append("nothing was trained")
    if compiled.backend.num_graphs > case.max_graphs:
        found.append(f"{compiled.backend.num_graphs} graphs")
    return found
