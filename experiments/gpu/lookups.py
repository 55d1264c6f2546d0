"""The 26 tables of a DLRM: 26 of FBGEMM's modules, and the one lookup that graphpasses makes of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import graphpasses as gp
from experiments.gpu.result import require
from experiments.harness.bench import time_rounds

__all__ = ["fused_lookups"]

NUM_TABLES, DIM, POOLING = 26, 64, 4
Batch = list[tuple[Tensor, Tensor]]
"""Ids and offsets of each table."""


def fused_lookups(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Bits, launches, time and memory of 26 lookups, eager and fused."""
    require("torchrec", "fbgemm_gpu")
    batch_size, num_rows = (8192, 1_000_000) if device == "cuda" else (512, 10_000)
    data = [_batch(seed, batch_size, num_rows, device) for seed in range(num_steps)]
    models = {name: _model(num_rows, device) for name in ("26 lookups", "fused", "control, another id")}
    calls: dict[str, Callable[..., Any]] = dict(models)
    report = gp.CompileReport()
    calls["fused"] = gp.compile(models["fused"], inner="aot_eager", report=report)
    found, memory = [], {}
    for name, call in calls.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        for index, batch in enumerate(data):
            if name.startswith("control") and index == num_steps - 1:
                ids = batch[0][0].clone()
                ids[0] = (ids[0] + 1) % num_rows
                batch = [(ids, batch[0][1]), *batch[1:]]
            _step(call, batch)
        memory[name] = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    tables = {
        name: [module.split_embedding_weights()[0] for module in model.tables] for name, model in models.items()
    }
    equal = {
        name: sum(torch.equal(a, b) for a, b in zip(tables[name], tables["26 lookups"], strict=True))
        for name in ("fused", "control, another id")
    }
    timed = {name: calls[name] for name in ("26 lookups", "fused")}

    def run(call: Callable[..., Any], index: int) -> None:
        _step(call, data[index % len(data)])
        if device == "cuda":
            torch.cuda.synchronize()

    timings = time_rounds({name: partial(run, call) for name, call in timed.items()}, max(5, num_steps))
    launches = {name: _launches(call, data[0], device) for name, call in timed.items()}
    unit = "kernel launches" if device == "cuda" else "of FBGEMM's kernels"
    for name in timed:
        text = f"{1e3 * timings[name].fastest:.2f} ms, {launches[name]} {unit}"
        found.append((name, f"{text}, peak {memory[name] / 2**20:,.0f} MiB" if device == "cuda" else text))
    found += [
        (f"tables with the bits of 26 lookups, {name}", f"{num} of {NUM_TABLES}") for name, num in equal.items()
    ]
    passes = [each for graph in report.by_graph.values() for each in graph if each.name == "fuse-tbe"]
    found += [("fuse-tbe", note) for note in dict.fromkeys(note for each in passes for note in each.notes)]
    # The last batch's loss depends on all ids, and so does every table's last update.
    is_right = equal["fused"] == NUM_TABLES > equal["control, another id"]
    return is_right and launches["fused"] < launches["26 lookups"] // 2, found


def _model(num_rows: int, device: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec  # noqa: F401  # its presence is what makes graphpasses trace FBGEMM's operators
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

    class Lookups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            places = (
                (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
                if device == "cuda"
                else (EmbeddingLocation.HOST, ComputeDevice.CPU)
            )
            self.tables = nn.ModuleList(
                SplitTableBatchedEmbeddingBagsCodegen(
                    [(num_rows, DIM, *places)],
                    optimizer=EmbOptimType.EXACT_SGD,
                    learning_rate=0.1,
                    device=torch.device(device),
                )
                for _ in range(NUM_TABLES)
            )
            torch.manual_seed(0)
            for table in self.tables:
                table.init_embedding_weights_uniform(-1.0, 1.0)
            self.top = nn.Linear(NUM_TABLES * DIM, 1, device=device)

        def forward(self, batch: Batch) -> Tensor:
            pooled = [table(*inputs) for table, inputs in zip(self.tables, batch, strict=True)]
            return self.top(torch.cat(pooled, 1))

    return Lookups()


def _batch(seed: int, batch_size: int, num_rows: int, device: str) -> Batch:
    """Each table's ids and offsets are tensors of their own: FBGEMM's check of bounds may write them."""
    generator = torch.Generator().manual_seed(seed)
    num_ids = batch_size * POOLING
    return [
        (
            torch.randint(0, num_rows, (num_ids,), generator=generator).to(device),
            torch.arange(0, num_ids + 1, POOLING, device=device),
        )
        for _ in range(NUM_TABLES)
    ]


def _step(call: Callable[..., Any], batch: Batch) -> None:
    call(batch).square().mean().backward()


def _launches(call: Callable[..., Any], batch: Batch, device: str) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        _step(call, batch)
    events = {event.key: event.count for event in profile.key_averages()}
    if device == "cuda":
        return sum(count for key, count in events.items() if "LaunchKernel" in key)
    own = (key.startswith("fbgemm::split_") and key.endswith("_cpu") for key in events)
    return sum(itertools.compress(events.values(), own))
