"""Ranks that are processes on one GPU: eager FSDP2 and the captured step, on the GPU; bytes travel over the host."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphpasses as gp
from experiments.fsdp_bench.steps import loss_fn, transformer
from graphpasses._torch.process_group import PythonProcessGroup
from graphpasses.simulate.process_group import NCCLSimProcessGroup, RingProcessGroup

__all__ = ["ranks_on_one_device", "register_backend"]

_VOCAB = 1024
_OLD_NAMES = {  # of torch before 2.13
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}


def ranks_on_one_device(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Losses and weights of two and four ranks, with the simulated rings of NCCL and with canonical reductions."""
    is_right, found = True, []
    for num_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            given = (num_ranks, get_free_port(), device, min(num_steps, 10), str(out))
            mp.spawn(_rank, given, nprocs=num_ranks)
            rows = json.loads(out.read_text())
        for reductions, equal, cost, num in rows:
            is_right &= equal["captured"] == num > equal["control"]
            text = f"{equal['captured']} of {num} steps equal, control {equal['control']}"
            found.append((f"{num_ranks} ranks, {reductions}", f"{text}; {cost['eager']} and {cost['captured']} ms"))
    return is_right, found


def _rank(rank: int, num_ranks: int, port: int, device: str, num_steps: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    register_backend(device)
    dist.init_process_group("nccl_sim_host", rank=rank, world_size=num_ranks)
    rows = []
    for reductions in ("NCCL's rings", "canonical reductions"):
        runs = {
            name: _train(name, reductions, device, num_steps, DeviceMesh(device, [*range(num_ranks)]))
            for name in ("eager", "captured", "control")
        }
        steps = runs["eager"][0]
        equal = {name: sum(map(steps.__contains__, found)) for name, (found, _) in runs.items()}
        rows.append((reductions, equal, {name: round(cost, 1) for name, (_, cost) in runs.items()}, num_steps))
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _train(
    name: str, reductions: str, device: str, num_steps: int, mesh: DeviceMesh
) -> tuple[list[tuple[float, str]], float]:
    """Returns loss and hash of the weights after each step, and the median of milliseconds."""
    torch.manual_seed(0)
    model: nn.Module = transformer(3, 256, _VOCAB).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if reductions == "canonical reductions":
        gp.canonical_reductions(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.001e-3 if name == "control" else 1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randint(0, _VOCAB, (4, 65), generator=generator).to(device) for _ in range(num_steps)]
    step: Callable[[Tensor], Tensor] | None = None
    if name == "captured":
        step = gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, data[0]))
    steps, seconds = [], []
    for tokens in data:
        start = time.perf_counter()
        if step is None:
            loss = loss_fn(model, tokens)
            loss.backward()
        else:
            loss = step(tokens)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        steps.append((loss.item(), gp.weight_hash(model)))
    return steps, 1e3 * statistics.median(seconds)


def register_backend(device: str) -> None:
    """Registers a backend like ``nccl_sim`` that takes tensors of a GPU."""
    for old, new in _OLD_NAMES.items():
        for kind in (PythonProcessGroup, RingProcessGroup):
            if not hasattr(dist.ProcessGroup, new) and hasattr(kind, new):
                setattr(kind, old, getattr(kind, new))

    class OverHost(NCCLSimProcessGroup):
        def __init__(self, options: Any, pg_options: Any) -> None:
            super().__init__(options, pg_options)
            if device == "cuda":
                store = dist.PrefixStore("cuda", options.store)
                gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
                self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, gloo)

        def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
            if not any(tensor.is_cuda for tensor in (*sent.values(), *received.values())):
                super().exchange(collective, sent, received)
                return
            copies: dict[int, Tensor] = {}
            on_host = {rank: copies.setdefault(id(tensor), tensor.detach().cpu()) for rank, tensor in sent.items()}
            arrived = {rank: torch.empty(tensor.shape, dtype=tensor.dtype) for rank, tensor in received.items()}
            super().exchange(collective, on_host, arrived)
            for rank, tensor in received.items():
                tensor.detach().copy_(arrived[rank])

    dist.Backend.register_backend("nccl_sim_host", OverHost, extended_api=True, devices=["cpu", "cuda"])
