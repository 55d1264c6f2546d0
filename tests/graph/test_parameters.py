"""What is known of parameters that FSDP shards over tensor parallelism, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import simple_fsdp
from graphpasses.errors import UnsupportedError
from graphpasses.graph.parameters import ParameterInfo, parameter_infos
from graphpasses.identity import IdentityMap
from tests.helpers.models import Parallel, make_mesh, make_parallel_meshes, parallelize


def infos_of(rank: int, *, num_ranks: int = 4, hybrid: bool = False) -> dict[str, ParameterInfo]:
    with fake_process_group(num_ranks, rank):
        data_mesh, tensor_mesh = make_parallel_meshes(num_ranks, hybrid=hybrid)
        model = simple_fsdp(parallelize(Parallel(), tensor_mesh), data_mesh)
        return parameter_infos(model, IdentityMap.of(model))


def test_fsdp_shards_what_tensor_parallelism_leaves() -> None:
    infos = infos_of(1)
    shapes = {fqn: info.shape for fqn, info in infos.items() if "layers.1" not in fqn}
    assert shapes == {
        "emb.weight": (8, 8),
        "layers.0.down.weight": (8, 8),
        "layers.0.down.bias": (8,),
        "layers.0.up.weight": (8, 8),
        "layers.0.up.bias": (8,),
        "layers.0.norm.weight": (8,),
        "layers.0.norm.bias": (8,),
        "head.weight": (8, 8),
        "head.bias": (8,),
    }
    assert {(info.shard_dim, info.shard_ranks, info.replicate_ranks) for info in infos.values()} == {(0, (1, 3), ())}


def test_ranks_of_an_fsdp_group_know_the_same() -> None:
    assert infos_of(0) == infos_of(2)
    assert infos_of(1) == infos_of(3)


def test_hybrid_over_tensor_parallelism() -> None:
    for rank, shard_ranks, replicate_ranks in ((0, (0, 2), (0, 4)), (7, (5, 7), (3, 7))):
        infos = infos_of(rank, num_ranks=8, hybrid=True).values()
        assert {(info.shard_ranks, info.replicate_ranks) for info in infos} == {(shard_ranks, replicate_ranks)}
        assert {info.shape for info in infos} == {(8, 8), (8,)}


def infos_of_weight(*placements: Placement) -> Any:
    with fake_process_group(4):
        model = nn.Linear(4, 4, bias=False)
        sharded = distribute_tensor(model.weight.data, make_mesh(hybrid=True), placements)
        model.weight = nn.Parameter(sharded)
        return parameter_infos(model, IdentityMap.of(model))


def test_both_axes_shard_another_dim() -> None:
    info = infos_of_weight(Shard(0), Shard(1))["weight"]
    assert (info.shape, info.shard_dim, info.shard_ranks) == ((4, 2), 0, (0, 2))


def test_an_axis_that_shards_what_the_one_before_left_is_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        infos_of_weight(Shard(0), Shard(0))
    assert str(caught.value) == (
        "parameter 'weight' has placements (Shard(dim=0), Shard(dim=0)); the FSDP passes support FSDP or HSDP over "
        "what tensor parallelism leaves of a parameter, as torchtitan applies them. Parallelise it in this order, or "
        "capture it without tensor parallelism"
    )


@pytest.mark.parametrize("rank", [0, 3])
def test_uneven_shards_of_a_part_are_refused(rank: int) -> None:
    """On every rank alike, also where tensor parallelism gave this rank a size that divides."""
    model = Parallel()
    model.head = nn.Linear(8, 14)
    with fake_process_group(4, rank):
        data_mesh, tensor_mesh = make_parallel_meshes()
        parallelize(model, tensor_mesh)
        with pytest.raises(UnsupportedError) as caught:
            simple_fsdp(model, data_mesh)
    assert str(caught.value) == (
        "parameter 'head.weight' has placements (_StridedShard(dim=0, sf=2), Shard(dim=0)), so 4 shards of dim 0, "
        "whose size 14 they do not divide; with tensor parallelism all shards are taken for "
        "equal. Make the size a multiple, or capture it without tensor parallelism"
    )


def test_uneven_shards_without_tensor_parallelism() -> None:
    with fake_process_group(4):
        model = simple_fsdp(nn.Linear(4, 5), make_mesh())
        assert isinstance(model._parameters["bias"], DTensor)
        assert parameter_infos(model, IdentityMap.of(model))["bias"].shape == (5,)
