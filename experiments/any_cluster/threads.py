"""The same bits on up to 256 ranks and on other clusters: ``python -m experiments.any_cluster.threads``."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from experiments.any_cluster.models import VOCAB, blocks, llama, loss_fn
from experiments.any_cluster.train import POLICY
from graphpasses.simulate import Topology, run_cluster
from graphpasses.terminal import make_console, plain_table

__all__ = ["main"]


def main(steps: int = 2, most: int = 64) -> int:
    """Trains Hugging Face's Llama on clusters whose ranks are threads, and compares the weights' hashes.

    Reductions of each cluster add as its NCCL would. In a tree there must be one hash on all of them; added by FSDP2
    itself, the last must differ from cluster to cluster. Exit code 0 if so, else 1.

    Args:
        steps: of the optimizer.
        most: ranks of the largest cluster, and microbatches of a global batch; a power of two, at least 16.
    """
    rings: dict[str, Any] = {"gpus_per_node": 8}
    clusters: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((1,), rings),
        ((16,), rings),
        ((most,), rings),
        ((most,), {"gpus_per_node": 4}),
        ((most,), rings | {"num_channels": 2}),
        ((most,), rings | {"protocol": "ll"}),
        ((most // 8, 8), rings),
        ((4, most // 4), rings),
    ]
    rows, found = [], []
    for shape, options in clusters:
        hashes = [_hash(shape, options, most, steps, in_tree=in_tree) for in_tree in (True, False)]
        found.append(hashes)
        facts = ", ".join(f"{name} {value}" for name, value in options.items())
        rows.append((" x ".join(map(str, shape)), facts, *(each[:12] for each in hashes)))
    make_console().print(plain_table(("mesh", "cluster", "in a tree", "by FSDP2"), rows))
    in_tree, by_fsdp2 = (({*column}) for column in zip(*found, strict=True))
    print(f"hashes of {len(clusters)} clusters: {len(in_tree)} in a tree, {len(by_fsdp2)} by FSDP2")
    return 0 if len(in_tree) == 1 < len(by_fsdp2) else 1


def _hash(
    shape: tuple[int, ...], options: dict[str, Any], num_microbatches: int, steps: int, *, in_tree: bool
) -> str:
    topology = Topology(
        math.prod(shape), **options | {"gpus_per_node": min(math.prod(shape), options["gpus_per_node"])}
    )
    found = {*run_cluster(_train, topology, shape, num_microbatches, steps, in_tree)}
    (same,) = found  # of all ranks
    return str(same)


def _train(shape: tuple[int, ...], num_microbatches: int, steps: int, in_tree: bool) -> str:
    torch.manual_seed(0)
    model: Any = llama()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    if in_tree:
        gp.canonical_reductions(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    divisor = num_microbatches if in_tree else num_microbatches // dist.get_world_size()
    for step in range(steps):
        tree = gp.MicrobatchTree(model) if in_tree else None
        for k in range(dist.get_rank(), num_microbatches, dist.get_world_size()):
            generator = torch.Generator().manual_seed(num_microbatches * step + k)
            (loss_fn(model, torch.randint(0, VOCAB, (1, 9), generator=generator)) / divisor).backward()
            if tree is not None:
                tree.add()
        if tree is not None:
            tree.finish()
        optimizer.step()
        optimizer.zero_grad()
    return gp.weight_hash(model)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
