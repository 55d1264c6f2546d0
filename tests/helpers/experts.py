"""A tiny language model with experts that ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from graphpasses._torch.dtensor import local_part
from tests.helpers.any_cluster import BF16
from tests.helpers.models import NUM_TOKENS

NUM_EXPERTS, WIDTH = 4, 8
COUNTS = ("mixture.counts",)
"""Buffers in which routers count."""


class Experts(nn.Module):
    """Each computes all tokens of the ranks that share it, zeros among them; with ``mesh``, ranks have some each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 3 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 3 * WIDTH, WIDTH) / 5)
        self.mesh: DeviceMesh | None = None

    def forward(self, routed: Tensor) -> Tensor:
        """Takes and returns tokens, [experts, tokens of this rank, width]."""
        up, down = local_part(self.up), local_part(self.down)
        num_own, num_tokens = len(up), routed.shape[1]
        received = self._exchange(routed).view(-1, num_own, num_tokens, WIDTH).transpose(0, 1)
        brought = F.silu(received.flatten(1, 2) @ up) @ down
        brought = brought.view(num_own, -1, num_tokens, WIDTH).transpose(0, 1)
        return self._exchange(brought.flatten(0, 1)).clone()  # FSDP2 warns of views

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.mesh is None:
            return rows
        sizes = [len(rows) // self.mesh.size()] * self.mesh.size()
        return all_to_all_single_autograd(rows.contiguous(), sizes, sizes, self.mesh.get_group())


class Mixture(nn.Module):
    """Sends each token to two experts; a bias that follows the counts balances their loads."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("counts", torch.zeros(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        is_chosen = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        self.counts += is_chosen.detach().sum(0)
        weights = (scores * is_chosen).t().unsqueeze(-1)
        brought = self.experts(is_chosen.t().unsqueeze(-1).to(tokens.dtype) * tokens)
        return x + (weights * brought).sum(0).to(x.dtype).view_as(x)

    @torch.no_grad()
    def balance(self) -> None:
        """Adds up the counts of all ranks, and prefers experts that had fewer tokens than others."""
        dist.all_reduce(self.counts)
        self.bias += 0.1 * torch.sign(self.counts.mean() - self.counts)
        self.counts.zero_()


class Sparse(nn.Module):
    """Embedding, experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixture(self.embedding(tokens)))


def shard_experts(model: Sparse, degree: int, *, dim: int = 0, is_last: bool = True) -> Sparse:
    """Shards a model; so many ranks share its experts, on a mesh of their own.

    ``dim`` is that on which FSDP shards experts; the expert-parallel axis is the last of the mesh, or the first.
    """
    num_ranks, experts = dist.get_world_size(), model.mixture.experts
    sizes = {"data": num_ranks // degree, "experts": degree}
    names = tuple(sizes if is_last else reversed(sizes))
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
    if degree > 1:
        experts.mesh = mesh["experts"]
        for name, weight in list(experts.named_parameters()):
            sharded = distribute_tensor(weight.detach(), experts.mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(sharded))
    fully_shard(experts, mesh=mesh["data"], mp_policy=BF16, shard_placement_fn=lambda _: Shard(dim))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("all",)), mp_policy=BF16)
    return model
