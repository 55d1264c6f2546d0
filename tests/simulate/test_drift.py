"""Which replicas are said to drift, and which do, on threads that add in the order of the rings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from graphpasses.errors import LayoutError, TopologyError
from graphpasses.fsdp import Layout, eager_layout, make_bucket_layout
from graphpasses.simulate import Drift, Topology, find_drift, run_cluster

JAGGED = Topology(40, gpus_per_node=8)  # the rows of 5 lie across nodes, the columns have 1 or 2 GPUs of a node
EVEN = Topology(40, gpus_per_node=5)
AXES = {"outer": 8, "inner": 5}
NUMEL = 4200


def layout_of(
    steps: Sequence[tuple[str, str]], axes: Mapping[str, int], op: str = "sum", num_shards: int | None = None
) -> Layout:
    """The reductions of one parameter of 4200 elements on rank 0, each a collective along an axis."""
    mesh = torch.arange(torch.Size(axes.values()).numel()).view(*axes.values())
    buckets = []
    for collective, axis in steps:
        along = mesh.movedim([*axes].index(axis), 0).flatten(1)[:, 0].tolist()
        parameters = [("w", (NUMEL,), 0)]
        buckets.append(make_bucket_layout(collective, along, op, torch.bfloat16, parameters, num_shards=num_shards))
    return Layout(tuple(buckets))


def results(
    topology: Topology,
    steps: Sequence[tuple[str, str]],
    axes: Mapping[str, int],
    op: str,
    shared: Sequence[str],
) -> list[Tensor]:
    """What each rank has after the reductions; gradients are equal along axes over which none reduces."""
    sizes = tuple(axes.values())

    def reduce() -> Tensor:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
        at = dict(zip(axes, mesh.get_coordinate() or (), strict=True))
        seed = sum(at[axis] * 100**index for index, axis in enumerate(axes) if axis not in shared)
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).bfloat16()
        how = getattr(dist.ReduceOp, op.upper())
        for collective, axis in steps:
            group = mesh[axis].get_group()
            if collective == "all_reduce":
                dist.all_reduce(tensor, how, group)
            else:
                shard = tensor.new_empty(len(tensor) // group.size())
                dist.reduce_scatter_single(shard, tensor, how, group)
                tensor = shard
        return tensor

    return run_cluster(reduce, topology)


def check(found: Drift, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Compares what is said of all pairs of holders with their bits; returns what is said of each axis."""
    for each in found.replicas:
        assert any(len(line) > 1 for line in each.holders) == (each.bits == "may differ")
        for line in each.holders:
            group_of = {rank: index for index, same in enumerate(line) for rank in same}
            for one, other in itertools.combinations(group_of, 2):
                assert torch.equal(tensors[one], tensors[other]) == (group_of[one] == group_of[other])
    return {each.axis: each.bits for each in found.replicas}


TWO_STEPS = (("all_reduce", "inner"), ("all_reduce", "outer"))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_two_all_reduces_on_a_jagged_mesh_drift(op: str) -> None:
    found = find_drift(layout_of(TWO_STEPS, AXES, op), JAGGED, AXES)
    bits = check(found, results(JAGGED, TWO_STEPS, AXES, op, ()))
    assert bits == {"outer": "same bits", "inner": "may differ"}
    outer, inner = found.replicas
    assert (outer.reason, inner.apart) == ("one all_reduce gives all of them one sum", "0|1|2|3|4 and 7 more")
    assert inner.reason == (
        "all_reduce over outer adds 5 15 10 20 30 25 35 0; 11 16 21 31 26 36 6 1; NCCL's rings of ranks 5 6 7 8 9 "
        "are a guess"
    )


@pytest.mark.parametrize("steps", [TWO_STEPS, TWO_STEPS[::-1]])
def test_on_an_even_mesh_they_do_not(steps: Sequence[tuple[str, str]]) -> None:
    found = find_drift(layout_of(steps, AXES), EVEN, AXES)
    assert check(found, results(EVEN, steps, AXES, "sum", ())) == {"outer": "same bits", "inner": "same bits"}
    assert (bool(found), found.outcome) == (False, "equal")


def test_hsdp_does_not_drift_on_a_jagged_mesh() -> None:
    """Each shard's sum is made in one group alone."""
    steps = (("reduce_scatter", "inner"), ("all_reduce", "outer"))
    found = find_drift(layout_of(steps, AXES, num_shards=5), JAGGED, AXES)
    assert check(found, results(JAGGED, steps, AXES, "sum", ())) == {"outer": "same bits"}


def test_fsdp_of_each_tensor_parallel_rank() -> None:
    """A parameter that tensor parallelism replicates is reduced once for each of its ranks."""
    steps = (("reduce_scatter", "outer"),)
    found = find_drift(layout_of(steps, AXES), JAGGED, AXES)
    assert check(found, results(JAGGED, steps, AXES, "sum", ["inner"])) == {"inner": "may differ"}
    assert find_drift(layout_of(steps, AXES), EVEN, AXES).outcome == "equal"


@pytest.mark.parametrize(("collective", "op"), [("reduce_scatter", "sum"), ("all_reduce", "avg")])
def test_where_no_ring_is_a_guess(collective: str, op: str) -> None:
    """Ranks 4 to 7 lie on two nodes, 0 to 3 and 8 to 11 on one each."""
    topology, axes = Topology(12, gpus_per_node=6, mode="cross_nic"), {"tp": 3, "dp": 4}
    steps = ((collective, "dp"),)
    found = find_drift(layout_of(steps, axes, op), topology, axes)
    bits = check(found, results(topology, steps, axes, op, ["tp"]))
    assert bits == {"tp": "may differ"} | ({"dp": "same bits"} if collective == "all_reduce" else {})
    assert found.replicas[0].holders[0] == ((0, 8), (4,))
    assert "guess" not in found.replicas[0].reason


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        (replace(JAGGED, mode="shared"), "NCCL's rings of ranks 5 6 7 8 9 are a guess"),
        (replace(EVEN, algorithm="auto"), "what NCCL takes for all_reduce of 8,400 bytes is in no log"),
        (
            replace(EVEN, algorithm="tree"),
            "the trees of 8 ranks on 8 nodes are not known: num_search_rings is",
        ),
    ],
)
def test_what_is_not_known_does_not_agree(topology: Topology, reason: str) -> None:
    axes = {**AXES, "alone": 1}
    found = find_drift(layout_of(TWO_STEPS, axes), topology, axes)
    outer, inner = found.replicas
    assert (outer.bits, inner.bits, found.outcome) == ("same bits", "unknown", "not compared")
    assert inner.reason.startswith(reason)


def test_sums_that_no_ring_decides() -> None:
    """Two ranks, and trees of graphpasses's own."""
    axes = {"outer": 2, "inner": 3}
    topology = Topology(6, gpus_per_node=2, algorithm="auto", protocol="auto")
    steps = (("reduce_scatter", "outer"),)
    assert find_drift(layout_of(steps, axes), topology, axes).outcome == "equal"
    assert find_drift(layout_of(steps, axes, "avg"), topology, axes).outcome == "not compared"
    assert find_drift(layout_of(TWO_STEPS, AXES, "tree"), JAGGED, AXES).outcome == "equal"


def test_of_three_ranks_an_average_alone_drifts() -> None:
    """``(a + b) + c`` is ``(b + a) + c``; an average rounds its first product alone."""
    topology, axes, steps = Topology(12, gpus_per_node=4), {"tp": 4, "dp": 3}, (("reduce_scatter", "dp"),)
    (same,), (apart,) = (find_drift(layout_of(steps, axes, op), topology, axes).replicas for op in ("sum", "avg"))
    assert (same.bits, apart.holders[0]) == ("unknown", ((0, 3, 9), (6,)))
    for op, each in (("sum", same), ("avg", apart)):
        check(Drift((each,)), results(topology, steps, axes, op, ["tp"]))


def test_gradients_that_are_reduced_whole_first() -> None:
    layout = layout_of((("all_reduce", "outer"), ("reduce_scatter", "inner")), AXES)
    (each,) = find_drift(layout, EVEN, AXES).replicas
    assert (each.axis, each.bits) == ("outer", "unknown")
    assert each.reason == "it is reduced whole and then scattered, which is not followed"


def test_a_step_of_fsdp2_beside_tensor_parallelism() -> None:
    """The placements say what tensor parallelism shards; of the rest each rank has another gradient."""

    def step() -> tuple[Drift, Drift, dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (8, 5), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(400), nn.Linear(400, 40, bias=False), nn.GELU())
        parallelize_module(model, mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        layout, axes = eager_layout(model), {"dp": 8, "tp": 5}
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(2, 5, 400, generator=generator)).square().mean().backward()
        gradients = {fqn: each.grad.to_local() for fqn, each in model.named_parameters()}
        return find_drift(layout, JAGGED, axes, model=model), find_drift(layout, JAGGED, axes), gradients

    results = run_cluster(step, JAGGED)
    found, everywhere, _ = results[0]
    assert [each.fqn for each in everywhere.replicas] == ["0.weight", "0.bias", "1.weight"]
    assert [(each.fqn, each.apart) for each in found.replicas] == [
        ("0.weight", "0|1|2|3|4 and 7 more"),
        ("0.bias", "0|1|2|3|4 and 7 more"),
    ]
    for each in found.replicas:
        check(Drift((each,)), [gradients[each.fqn] for *_, gradients in results])


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({"dp": 8, "tp": 4}, TopologyError, "the mesh {'dp': 8, 'tp': 4} has 32 ranks, the topology 40"),
        (
            {"dp": 4, "tp": 10},
            LayoutError,
            (
                "bucket 0 is over ranks 0, 1, 2, 3, 4, which are no line or plane of the mesh {'dp': 4, 'tp': 10}; "
                "give the mesh of the run"
            ),
        ),
    ],
)
def test_another_mesh(axes: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        find_drift(layout_of(TWO_STEPS, AXES), JAGGED, axes)
