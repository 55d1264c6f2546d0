"""How a dense part beside the tables is sharded: by FSDP2 in eager runs, by SimpleFSDP in compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.torchrec_parity.cases import LOCAL_SIZE, UNCOMPILED, Case
from experiments.torchrec_parity.models import Block
from graphpasses.capture import simple_fsdp
from graphpasses.simulate import Topology, configure

__all__ = ["shard_dense"]


def shard_dense(case: Case, variant: str) -> Callable[[nn.Module], object] | None:
    """Returns what shards a tower's dense part in place, for ``models.build``.

    Args:
        case: which.
        variant: how it is trained.
    """
    if case.dense == "ddp":
        return None
    shard = _fully_shard if variant in UNCOMPILED else partial(simple_fsdp, param_dtype=torch.bfloat16)
    return partial(shard, mesh=_mesh(case.dense))


def _fully_shard(score: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16)
    for module in (*filter(lambda module: isinstance(module, Block), score.modules()), score):
        fully_shard(module, mesh=mesh, mp_policy=policy)


@cache  # DTensor's caches take meshes of equal ranks and names for one, groups apart
def _mesh(dense: str) -> DeviceMesh:
    """Makes a mesh whose reductions are added in the order of NCCL's rings: gloo's order no layout can change."""
    num_ranks = dist.get_world_size()
    configure(Topology(num_ranks, gpus_per_node=LOCAL_SIZE, mode="rail"))
    axes = {"shard": num_ranks}
    if dense == "hsdp":
        axes = {"replicate": num_ranks // LOCAL_SIZE, "shard": LOCAL_SIZE}
    names = tuple(axes)
    backend = dict.fromkeys(names, "nccl_sim")
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=names, backend_override=backend)
