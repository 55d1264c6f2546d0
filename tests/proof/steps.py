"""The step whose rewrites tests of proofs look at: of an FSDP2 model and of a SimpleFSDP model, on four ranks."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphpasses as gp
from graphpasses.graph import CapturedStep, TrainGraph

RANK, NUM_RANKS = 1, 4
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    """Uneven shards, two weights of one shape, a tied one, a batch norm, dropout, a weight that is used twice."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.one(self.embedding(ids)))
        x = self.dropout(self.two(self.two(x)))
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).float().square().mean()


def sharded(width: int = 6) -> nn.Module:
    model = Model(width)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    return model


def plain(width: int = 6) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return gp.simple_fsdp(Model(width), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def capture(model: nn.Module) -> CapturedStep:
    return gp.capture_train_step(loss_fn, model, torch.zeros(6, dtype=torch.int64), check=False)


def calls(graph: TrainGraph, target: object) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)
