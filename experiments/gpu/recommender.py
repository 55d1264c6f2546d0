"""A DLRM that TorchRec's DistributedModelParallel holds on one rank: compiled against eager, in bits and time."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import graphpasses as gp
from experiments.gpu.result import require
from experiments.gpu.steps import wait, world

__all__ = ["recommender"]

NUM_TABLES, DIM, NUM_DENSE = 12, 64, 13
Batch = tuple[Tensor, Any, Tensor]


def recommender(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Losses and all state after each step, eager and compiled, another learning rate as the control; times.

    With deterministic algorithms, without which ``check_compiled`` compares no bits on a GPU.
    """
    require("torchrec", "fbgemm_gpu")
    torch.use_deterministic_algorithms(True)
    with world(device):
        runs = {
            "eager": _train(device, num_steps),
            "eager again": _train(device, num_steps),
            "compiled, aot_eager": _train(device, num_steps, inner="aot_eager"),
            "compiled, inductor": _train(device, num_steps, inner="inductor"),
            "control, another learning rate": _train(device, num_steps, rate=0.0101),
        }
        checked = _checked(device)
    reference, found, is_right = runs["eager"][0], [], checked == "no difference"
    for name, (states, milliseconds) in runs.items():
        equal = sum(a == b for a, b in zip(states, reference, strict=True))
        is_right &= "inductor" in name or (equal == num_steps) != name.startswith("control")
        found.append((name, f"{equal} of {num_steps} steps equal, {milliseconds:.2f} ms"))
    return is_right, [*found, ("check_compiled", checked)]


def _checked(device: str) -> str:
    model, batch = _model(device, 0.01), _batch(0, device)
    result = gp.check_compiled(_loss, gp.compile(model, inner="aot_eager"), *batch)
    return "no difference" if result is None else str(result)


def _train(device: str, num_steps: int, *, inner: str | None = None, rate: float = 0.01) -> tuple[list[str], float]:
    """Returns after each step a hash of the loss and of all state, and the median of milliseconds."""
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model = _model(device, rate)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=1e-3)
    call = model if inner is None else gp.compile(model, inner=inner)
    hashes, seconds = [], []
    for step in range(num_steps):
        batch = _batch(step, device)
        wait(device)
        start = time.perf_counter()
        loss = _loss(call, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        seconds.append(time.perf_counter() - start)
        state = {"model": model.state_dict(), "tables": model.fused_optimizer.state_dict()["state"]}
        hashes.append(f"{loss.item()!r} {_hash(state)}")
    return hashes, 1e3 * statistics.median(seconds)


def _hash(state: Any) -> str:
    """Returns a hash of all tensors in nested dicts, of sharded ones of what lies here."""
    if isinstance(state, dict):
        return " ".join(f"{name}:{_hash(value)}" for name, value in sorted(state.items()))
    if hasattr(state, "local_shards"):
        return " ".join(gp.parity.tensor_hash(shard.tensor) for shard in state.local_shards())
    if hasattr(state, "to_local"):
        return _hash(state.to_local())
    return gp.parity.tensor_hash(state) if isinstance(state, Tensor) else repr(state)


def _loss(model: nn.Module, dense: Tensor, ids: Any, labels: Tensor) -> Tensor:
    logits: Tensor = model(dense, ids).squeeze(-1)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _model(device: str, rate: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed import sharding_plan as plans
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.models.dlrm import DLRM
        from torchrec.optim import RowWiseAdagrad

    torch.manual_seed(0)
    num_rows = 1_000_000 if device == "cuda" else 1_000
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=num_rows, feature_names=[f"f{i}"])
        for i in range(NUM_TABLES)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": rate})
    model = DLRM(collection, NUM_DENSE, [256, DIM], [256, 1], dense_device=torch.device(device))
    kinds = (plans.table_wise(rank=0), plans.row_wise(), plans.column_wise(ranks=[0]))
    plan = plans.construct_module_sharding_plan(
        collection,
        {table.name: kinds[index % 3] for index, table in enumerate(tables)},
        local_size=1,
        world_size=1,
        device_type=device,
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device(device, 0) if device == "cuda" else torch.device(device),
        plan=ShardingPlan({"sparse_arch.embedding_bag_collection": plan}),
    )


def _batch(step: int, device: str) -> Batch:
    """Bags of no to four ids."""
    from torchrec import KeyedJaggedTensor

    size, num_rows = (4096, 1_000_000) if device == "cuda" else (64, 1_000)
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (NUM_TABLES * size,), generator=generator)
    ids = torch.randint(0, num_rows, (int(lengths.sum()),), generator=generator)
    keyed = KeyedJaggedTensor([f"f{i}" for i in range(NUM_TABLES)], ids, lengths=lengths).to(torch.device(device))
    dense = torch.randn(size, NUM_DENSE, generator=generator)
    labels = torch.randint(0, 2, (size,), generator=generator).float()
    return dense.to(device), keyed, labels.to(device)
