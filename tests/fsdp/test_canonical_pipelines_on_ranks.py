"""Gradients of a pipeline's stages are the same on any number of data-parallel ranks, and as without a pipeline."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import graphpasses as gp
from graphpasses.parity.launch import run_ranks
from tests.helpers.any_cluster import BF16, sums_alone
from tests.helpers.models import NUM_TOKENS

NUM_LEAVES, NUM_SAMPLES, WIDTH = 4, 4, 8  # of a global batch; of a leaf, one in each microbatch of the pipeline
NUM_RANKS = 4
HOW = {  # stages, data-parallel ranks, schedule; what is left of four ranks trains copies
    "alone": (1, 1, None, True),
    "two stages": (2, 1, ScheduleGPipe, True),
    "two stages on two ranks each": (2, 2, ScheduleGPipe, True),
    "one forward, one backward": (2, 2, Schedule1F1B, True),
    "by FSDP2, two stages": (2, 1, ScheduleGPipe, False),
    "by FSDP2, two stages on two ranks each": (2, 2, ScheduleGPipe, False),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(NUM_TOKENS, WIDTH), Layer(), Layer(), Head(WIDTH, NUM_TOKENS))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / (NUM_LEAVES * NUM_SAMPLES)


def batch(step: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + k)
    return torch.randint(0, NUM_TOKENS, (2, NUM_SAMPLES, 5), generator=generator)


def accumulate(model: nn.Module, tokens: Tensor, labels: Tensor) -> None:
    """What a pipeline's schedule does: gradients wait, and are reduced with the last microbatch's."""
    for index in range(NUM_SAMPLES):
        model.set_requires_gradient_sync(index == NUM_SAMPLES - 1)
        loss_fn(model(tokens[index : index + 1]), labels[index : index + 1]).backward()


def train(num_stages: int, num_data_parallel: int, schedule: type | None, in_tree: bool) -> dict[str, str]:
    """Runs on every rank; returns the norms, and the hashes of its stage's weights by their names in the model."""
    sizes = {"copies": NUM_RANKS // num_stages // num_data_parallel, "stages": num_stages, "data": num_data_parallel}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    whole, index = build(), mesh.get_local_rank("stages")
    first, last = (len(whole) * each // num_stages for each in (index, index + 1))
    model = nn.Sequential(OrderedDict([*whole.named_children()][first:last]))
    for module in (*model, model):
        fully_shard(module, mesh=mesh["data"], mp_policy=BF16)
    if in_tree:
        gp.canonical_reductions(model)
    else:
        sums_alone(model)
    if schedule is not None:
        stage = PipelineStage(model, index, num_stages, torch.device("cpu"), group=mesh.get_group("stages"))
        pipeline = schedule(stage, NUM_SAMPLES, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hashes = {}
    for step in range(2):
        tree = gp.MicrobatchTree(model) if in_tree else None
        for k in range(mesh.get_local_rank("data"), NUM_LEAVES, num_data_parallel):
            tokens, labels = batch(step, k)
            if schedule is None:
                accumulate(model, tokens, labels)
            else:
                pipeline.step(*([tokens] if index == 0 else []), target=labels if index == num_stages - 1 else None)
            if tree is not None:
                tree.add()
        if tree is not None:
            tree.finish()
        norm = gp.canonical_clip_grad_norm_(model.parameters(), 0.1, stages=mesh.get_group("stages"))
        hashes[f"norm of step {step}"] = norm.item().hex()
        optimizer.step()
        optimizer.zero_grad()
    return hashes | gp.parity.weight_hashes(model, group=mesh.get_group("data"))


def train_all() -> dict[str, dict[str, str]]:
    return {name: train(*how) for name, how in HOW.items()}


@pytest.fixture(scope="module")
def hashes() -> dict[str, dict[str, str]]:
    """Of each way, of all stages together."""
    found: dict[str, dict[str, str]] = {name: {} for name in HOW}
    for of_rank in run_ranks(
        train_all, NUM_RANKS, backend="gloo", preload=("torch.distributed.fsdp",), timeout=300.0
    ):
        for name, own in of_rank.items():
            assert all(found[name].setdefault(fqn, value) == value for fqn, value in own.items())
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [name for name in HOW if "FSDP2" not in name][1:])
def test_hashes_of_a_pipeline_are_those_of_one_rank(hashes: dict[str, dict[str, str]], name: str) -> None:
    assert len(hashes[name]) == 2 + len([*build().parameters()])
    assert hashes[name] == hashes["alone"]


@pytest.mark.multiprocess
def test_fsdp2_by_itself_differs(hashes: dict[str, dict[str, str]]) -> None:
    assert (
        len({str(sorted(each.items())) for name, each in hashes.items() if "FSDP2" in name or name == "alone"}) == 3
    )
