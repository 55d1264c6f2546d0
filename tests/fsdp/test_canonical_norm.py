"""A gradients' norm whose bits do not depend on the number of ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphpasses as gp
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.canonical_norm import sum_in_tree
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import SHAPES, Training, on_cluster, shard

GRADIENTS = {  # fewer rows than ranks, rows that they do not divide, long and short ones
    "scale": (1,),
    "bias": (13,),
    "weight": (37, 129),
    "kernel": (5, 3, 3, 3),
    "large": (64, 4099),
}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in GRADIENTS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def norms(shape: Sequence[int]) -> tuple[str, ...]:
    """Runs on every rank; returns torch's norm, ours, and a hash of the clipped gradients."""
    model = shard(Holder(), shape)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        whole = torch.randn(GRADIENTS[name], generator=generator)
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    usual = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = gp.canonical_clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(usual, DTensor)
    return usual.full_tensor().item().hex(), norm.item().hex(), str(gp.parity.gradient_hashes(model))


@functools.cache
def on(shape: tuple[int, ...]) -> tuple[str, ...]:
    num_ranks = math.prod(shape)
    results = run_cluster(norms, Topology(num_ranks, gpus_per_node=num_ranks), shape)
    assert all(each == results[0] for each in results)
    return results[0]


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_one_norm_on_every_mesh(shape: tuple[int, ...]) -> None:
    assert on(shape)[1:] == on((1,))[1:]


def test_torch_s_norm_differs() -> None:
    assert len({on(shape)[0] for shape in SHAPES}) > 1


def test_it_is_the_norm() -> None:
    usual, norm = (float.fromhex(each) for each in on((4,))[:2])
    assert norm == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("num_columns", [1, 7, 64, 257, 4099])
def test_a_row_s_sum_does_not_depend_on_its_neighbours(num_columns: int) -> None:
    rows = torch.randn(67, num_columns, generator=torch.Generator().manual_seed(0))
    whole = sum_in_tree(rows.clone())
    for start, end in ((0, 1), (66, 67), (3, 20), (0, 67)):
        assert torch.equal(sum_in_tree(rows[start:end].clone()), whole[start:end])


def test_a_mesh_of_trained_and_clipped_models() -> None:
    how = Training(max_norm=0.05)
    found = {on_cluster(how, shape) for shape in ((1,), (4,), (2, 2))}
    assert len(found) == 1
    assert found != {on_cluster(Training(), (1,))}


def test_it_clips_as_torch_does() -> None:
    ours, theirs = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
    for each in (ours, theirs):
        each.grad = torch.arange(12.0).view(4, 3) - 5
    norms = gp.canonical_clip_grad_norm_([ours], 2.0), nn.utils.clip_grad_norm_([theirs], 2.0)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(ours.grad, theirs.grad)
    small = nn.Parameter(torch.zeros(2))
    small.grad = torch.tensor([0.1, -0.1])
    gp.canonical_clip_grad_norm_([small, nn.Parameter(torch.zeros(1))], 2.0)
    assert torch.equal(small.grad, torch.tensor([0.1, -0.1]))
    assert gp.canonical_clip_grad_norm_([nn.Parameter(torch.zeros(1))], 1.0) == 0


@pytest.mark.parametrize("dim", [0, 1])
def test_experts_on_a_mesh_of_their_own(dim: int) -> None:
    """5 experts of 2 ranks, each sharded over others; torch's norm of them differs."""

    def norms(degree: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // degree, degree), mesh_dim_names=("data", "experts"))
        weight = torch.randn(5, 4, 33, generator=torch.Generator().manual_seed(0))
        model = nn.Module()
        model.experts = nn.Parameter(distribute_tensor(weight, mesh["experts"], [Shard(0)], src_data_rank=None))
        model.bias = nn.Parameter(distribute_tensor(weight[0, 0], mesh["experts"], [Replicate()], src_data_rank=None))
        fully_shard(model, mesh=mesh["data"], shard_placement_fn=lambda p: Shard(dim if p.dim() > 1 else 0))
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        usual = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        return gp.canonical_clip_grad_norm_(model.parameters(), 1.0).item(), usual.full_tensor().item()

    shapes = [(num_ranks, degree) for num_ranks in (1, 2, 4, 8) for degree in (1, 2) if degree <= num_ranks]
    shapes.remove((8, 1))  # more than there are columns
    found = {each for n, degree in shapes for each in run_cluster(norms, Topology(n, gpus_per_node=n), degree)}
    assert len({norm for norm, _ in found}) == 1 < len({usual for _, usual in found})
    norm, usual = found.pop()
    assert norm == pytest.approx(usual, rel=1e-6)


def test_other_shards_are_refused() -> None:
    def clip() -> None:
        parameter = nn.Parameter(torch.zeros(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)], src_data_rank=None))
        parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(
            UnsupportedError, match=r"a gradient of shape \(4, 4\) has placements \(Shard\(dim=1\),\)"
        ):
            gp.canonical_clip_grad_norm_([parameter], 1.0)

    run_cluster(clip, Topology(2, gpus_per_node=2))
