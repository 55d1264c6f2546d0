"""What is trained: decoders of untied and of tied weights, of experts, with HSDP, tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from experiments.fsdp_parity.models import Attention, Block, Decoder, gpt_block, llama_block

__all__ = ["MODELS", "gather_ahead", "sharded"]

DIM, VOCAB = 512, 4096
RANKS_PER_NODE = 8


class Experts(nn.Module):
    """Each expert takes the tokens that score highest with it, twice as many in all as there are."""

    def __init__(self, num_experts: int = 8, hidden: int = 512) -> None:
        super().__init__()
        self.scores = nn.Linear(DIM, num_experts, bias=False)
        self.up, self.gate = (nn.Parameter(torch.randn(num_experts, DIM, hidden) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, DIM) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.scores(tokens).softmax(-1).t()
        weights, chosen = scores.topk(2 * len(tokens) // len(scores), -1)
        mine = tokens[chosen]
        hidden = F.silu(mine @ self.gate) * (mine @ self.up)
        brought = hidden @ self.down * weights.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), brought.flatten(0, 1)).view_as(x)


class ExpertsOfRanks(nn.Module):
    """One expert for each rank of a node, to which the others send their tokens that score highest with it."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.scores = nn.Linear(DIM, RANKS_PER_NODE, bias=False)
        self.expert = FeedForward(hidden)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.scores(tokens).softmax(-1).t()
        weights, chosen = scores.topk(2 * len(tokens) // len(scores), -1)
        arrived = self._exchange(tokens[chosen].flatten(0, 1))
        brought = self._exchange(self.expert(arrived)) * weights.reshape(-1, 1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), brought).view_as(x)

    def _exchange(self, rows: Tensor) -> Tensor:
        assert self.group is not None
        return all_to_all_single_autograd(rows, None, None, self.group)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*io, bias=False) for io in ((DIM, hidden),) * 2 + ((hidden, DIM),))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


def _experts_block(experts: Callable[[], nn.Module]) -> Block:
    return Block(nn.RMSNorm(DIM), Attention(bias=False, dim=DIM), nn.RMSNorm(DIM), experts())


def _llama() -> nn.Module:
    return Decoder([llama_block(DIM) for _ in range(12)], nn.RMSNorm(DIM), VOCAB, dim=DIM)


def _tied() -> nn.Module:
    blocks = [gpt_block(4 * DIM, DIM) for _ in range(12)]
    return Decoder(blocks, nn.LayerNorm(DIM), 2 * VOCAB, tied=True, dim=DIM)


def _experts(experts: Callable[[], nn.Module] = Experts) -> nn.Module:
    return Decoder([_experts_block(experts) for _ in range(6)], nn.RMSNorm(DIM), VOCAB, dim=DIM)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "tied": _tied,
    "experts": _experts,
    "llama, HSDP": _llama,  # sharded in a node
    "llama, tensor parallel": _llama,  # in a node, its feed-forward layers
    "experts, expert parallel": partial(_experts, ExpertsOfRanks),  # in a node
}


def sharded(name: str, num_ranks: int) -> nn.Module:
    """Returns a model on which ``fully_shard`` was called: each layer and the rest."""
    torch.manual_seed(0)
    model = MODELS[name]()
    mesh = init_device_mesh("cpu", (num_ranks,))
    if "," in name:
        nodes = (num_ranks // RANKS_PER_NODE, RANKS_PER_NODE)
        mesh = init_device_mesh("cpu", nodes, mesh_dim_names=("nodes", "in node"))
    if name.endswith("tensor parallel"):
        styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer.mlp, mesh["in node"], styles)
        mesh = mesh["nodes"]
    if name.endswith("expert parallel"):
        for layer in model.layers:
            layer.mlp.group = mesh.get_group("in node")
            fully_shard(layer.mlp.expert, mesh=mesh["nodes"])
        mesh = mesh._flatten("all")
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh)
    return model


def gather_ahead(model: nn.Module, is_on: bool) -> None:
    """Lets FSDP2 gather the next module ahead, or none.

    On a GPU it does so in forward by itself, since the host runs ahead of the device. Here the host is the device, so
    it is told to. In backward it does so anyway, unless it is told to gather what is there already.
    """
    for module, following in pairwise(each for each in model.modules() if isinstance(each, FSDPModule)):
        module.set_modules_to_forward_prefetch([following] if is_on else [])
        following.set_modules_to_backward_prefetch([] if is_on else [following])
