"""The floor of a workload: what its step must do in any case, part by part, each alone and at its fastest.

The parts are FBGEMM's kernels on the tables of a rank, joined into one module, for the batches that it receives; the
bytes of a step through the process group, in as few collectives as their order allows; and the dense layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

from experiments.harness.bench import time_on_ranks
from experiments.torchrec_bench.models import LR, Batch, build, make_batch, table_configs, with_dense_layers
from experiments.torchrec_bench.results import DENSE
from experiments.torchrec_bench.workloads import Variant, Workload
from graphpasses.embedding.arena import prefer_huge_pages
from graphpasses.embedding.torchrec.ddp_calls import modules_and_lookups

__all__ = ["Parts", "make_parts"]

PHASES = ("ids", "pooled", "backward")
_NUM_RECORDED = 4  # batches, so that lookups do not find their rows in the caches

Parts = Mapping[str, Callable[[int], float]]
"""By name what takes a step of a part, given its number, and returns the seconds of the slowest rank."""


def make_parts(workload: Workload, variant: Variant) -> Parts:
    """Trains a few steps eagerly, to see what a step does, and makes the parts of the floor from it.

    Args:
        workload: what is trained.
        variant: whose tables and layout are those of the floor.

    Returns:
        Its parts; those of one process send nothing.
    """
    model = build(workload, variant)
    lookups = [
        module for module in modules_and_lookups(model) if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)
    ]
    for step in range(3):  # DistributedDataParallel makes its buckets anew in the third
        model(*make_batch(workload, step, dist.get_rank())).backward()
    steps = [_record(model, lookups, make_batch(workload, step, dist.get_rank())) for step in range(_NUM_RECORDED)]
    parts = {"lookups": _lookups(lookups, steps)}
    del model
    for step in steps:
        step.ids.clear()
    gc.collect()
    if workload.num_ranks > 1:
        parts["collectives"] = _collectives(steps[0])
    for name, compiled in zip(DENSE, (False, True), strict=True):
        parts[name] = _dense(workload, compiled=compiled)
    return {name: lambda index, part=part: time_on_ranks(lambda: part(index)) for name, part in parts.items()}


@dataclass
class _Recorded(TorchDispatchMode):
    """A step: ids and offsets by lookup, and bytes by phase: to and from each rank, or of the all-reduce."""

    ids: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    received: dict[str, list[int]] = field(default_factory=dict)
    num_reduced: int = 0
    in_backward: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        world = dist.get_world_size() if func.namespace == "c10d" else 1
        if func is torch.ops.c10d.alltoall_base_.default:
            _, given, _, output_splits, splits = args[:5]
            if splits:  # else they are the sizes of what follows
                self._send(given, splits, output_splits)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self._send(args[1].flatten(), *[[args[0].numel()] * world] * 2)
        elif func is torch.ops.c10d._allgather_base_.default:
            self._send(args[1].flatten(), *[[args[1].numel()] * world] * 2)
        elif func is torch.ops.c10d.allreduce_.default:
            self.num_reduced += sum(tensor.numel() for tensor in args[0])
        elif func.namespace == "c10d":
            raise NotImplementedError(f"the floor does not know {func}")
        return func(*args, **(kwargs or {}))

    def _send(self, given: Tensor, splits: Sequence[int], output_splits: Sequence[int]) -> None:
        phase = "backward" if self.in_backward else "pooled" if given.is_floating_point() else "ids"
        size = given.element_size() * (given.numel() // max(1, given.shape[0]))
        for total, part in ((self.sent, splits), (self.received, output_splits)):
            before = total.get(phase, [0] * len(part))
            total[phase] = [a + size * b for a, b in zip(before, part, strict=True)]


def _record(model: nn.Module, lookups: Sequence[nn.Module], batch: Batch) -> _Recorded:
    step = _Recorded()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("indices", "offsets")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        step.ids[module] = (given["indices"].long().clone(), given["offsets"].long().clone())

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in lookups]
    with step:
        loss = model(*batch)
        step.in_backward = True
        loss.backward()
    for hook in hooks:
        hook.remove()
    return step


def _lookups(lookups: Sequence[Any], steps: Sequence[_Recorded]) -> Callable[[int], object]:
    """Forward and backward of all tables of this rank, joined into one module of FBGEMM."""
    firsts = accumulate((len(module.embedding_specs) for module in lookups), initial=0)
    joined = SplitTableBatchedEmbeddingBagsCodegen(
        [spec for module in lookups for spec in module.embedding_specs],
        feature_table_map=[
            first + table
            for first, module in zip(firsts, lookups, strict=False)
            for table in module.feature_table_map
        ],
        optimizer=lookups[0].optimizer,
        learning_rate=LR,
        device=torch.device("cpu"),
    )
    for weights in joined.split_embedding_weights():
        prefer_huge_pages(weights)
        weights.fill_(0.01)
    given = []
    for step in steps:
        ids, offsets = zip(*(step.ids[module] for module in lookups), strict=True)
        starts = accumulate((len(part) for part in ids), initial=0)
        moved = [part[:-1] + start for part, start in zip(offsets, starts, strict=False)]
        given.append((torch.cat(ids), torch.cat([*moved, torch.tensor([sum(map(len, ids))])])))
    gradient = torch.full_like(joined(*given[0]), 1e-6)
    return lambda index: joined(*given[index % len(given)]).backward(gradient)


def _collectives(step: _Recorded) -> Callable[[int], object]:
    """The bytes of a step: ids, pooled rows, their gradients, and one all-reduce."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    exchanges = [
        (
            torch.empty(sum(step.received[phase]), dtype=torch.uint8),
            _some_bytes(sum(sent)),
            step.received[phase],
            sent,
        )
        for phase, sent in sorted(step.sent.items(), key=lambda item: PHASES.index(item[0]))
    ]
    gradients = torch.full((step.num_reduced,), 1e-6)

    def run(_: int) -> None:
        dist.all_to_all_single(torch.empty_like(sizes), sizes)
        for exchange in exchanges:
            dist.all_to_all_single(*exchange)
        if step.num_reduced:
            dist.all_reduce(gradients)
            gradients.fill_(1e-6)

    return run


def _some_bytes(num: int) -> Tensor:
    return torch.ones(num, dtype=torch.uint8)


class _Pooled(nn.Module):
    """Stands for a collection whose pooled rows are there already."""

    def __init__(self, tables: list[EmbeddingBagConfig], batch_size: int) -> None:
        super().__init__()
        self._tables = tables
        self.values = torch.rand(batch_size, sum(table.embedding_dim for table in tables), requires_grad=True)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the tables, of which DLRM asks."""
        return self._tables

    def forward(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows."""
        tables = self._tables
        return KeyedTensor([t.feature_names[0] for t in tables], [t.embedding_dim for t in tables], self.values)


def _dense(workload: Workload, *, compiled: bool) -> Callable[[int], object]:
    """Everything but tables and collectives: forward, backward, optimizer."""
    pooled = _Pooled(table_configs(workload), workload.batch_size)
    model = with_dense_layers(workload, [pooled])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR) if [*model.parameters()] else None
    run = torch.compile(model) if compiled else model
    batches = [make_batch(workload, step, dist.get_rank()) for step in range(_NUM_RECORDED)]

    def step(index: int) -> None:
        run(*batches[index % len(batches)]).backward()
        pooled.values.grad = None
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step
