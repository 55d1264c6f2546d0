"""What is said to keep its bits on another cluster keeps them in the simulated reductions of both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses.errors import TopologyError
from graphpasses.fsdp import BucketLayout, Layout, eager_layout, make_bucket_layout
from graphpasses.simulate import Topology, TopologyDiff, diff_topologies, run_cluster, topology_from_log
from graphpasses.simulate.collectives import simulate_reduce_scatter
from graphpasses.simulate.rings import Ring
from tests.helpers.reductions import simulate_all_reduce

FORTH, BACK = (0, 1, 2, 3, 4, 5, 6, 7), (0, 7, 6, 5, 4, 3, 2, 1)
SHAPES = {"embed": (8, 8000), "w": (8, 27_000), "norm": (8,)}
RING: dict[str, Any] = {"algorithm": "ring", "protocol": "simple"}
MOVED = (3, 0, 2, 1, 4, 6, 7, 5)  # and not back by itself


def log_of(rings: Sequence[Ring], *lines: str, version: str = "2.30.3") -> str:
    channels = (
        f"n0:1:1 [0] NCCL INFO Channel {channel:02}/{len(rings):02} : {' '.join(map(str, ring))}"
        for channel, ring in enumerate(rings)
    )
    return "\n".join([f"n0:1:1 [0] NCCL INFO NCCL version {version}+cuda12.9", *channels, *lines])


def of(*rings: Ring, lines: Sequence[str] = (), version: str = "2.30.3", **options: Any) -> Topology:
    return topology_from_log(log_of(rings, *lines, version=version), gpus_per_node=4, **(RING | options))


def moved(ring: Ring, names: Sequence[int] = MOVED) -> Ring:
    return tuple(names[rank] for rank in ring)


def layout_of(*collectives: str, op: str = "sum", num_ranks: int = 8) -> Layout:
    return Layout(
        tuple(
            make_bucket_layout(
                collective,
                range(num_ranks),
                op,
                torch.bfloat16,
                [(f"{collective}.{name}", shape, 0) for name, shape in SHAPES.items()],
            )
            for collective in collectives
        )
    )


BOTH = layout_of("reduce_scatter", "all_reduce")


def reduced(bucket: BucketLayout, topology: Topology) -> dict[str, Tensor]:
    """Of each parameter what the ranks get, [rank or 1, element], of gradients that are one for all topologies."""
    num_rows = len(bucket.ranks) if bucket.collective == "reduce_scatter" else 1
    generator = torch.Generator().manual_seed(0)
    shape = len(bucket.ranks), num_rows * bucket.num_bytes // 2
    values = torch.randn(shape, generator=generator).bfloat16()
    if num_rows > 1:
        rows = torch.stack(simulate_reduce_scatter(values, topology, bucket.op))
    else:
        rows = simulate_all_reduce(values, topology, bucket.op)[None]
    sizes = [entry.padded_numel for entry in bucket.entries]
    return dict(zip((entry.fqn for entry in bucket.entries), rows.split(sizes, dim=1), strict=True))


def check(layout: Layout, a: Topology, b: Topology) -> dict[str, str]:
    """Compares what is said with the reductions of both; returns what is said."""
    found = diff_topologies(layout, a, b)
    results = [{k: v for each in layout.buckets for k, v in reduced(each, t).items()} for t in (a, b)]
    for each in found.gradients:
        num_other = (results[0][each.fqn] != results[1][each.fqn]).sum().item()
        assert each.bits != "unknown"
        assert num_other <= each.num_elements  # 0 of what has the same bits
        if each.num_elements > 50:
            assert num_other > 0
    return {each.fqn: each.bits for each in found.gradients}


def restored(layout: Layout, a: Topology, b: Topology, order: Sequence[int]) -> bool:
    """Whether all gradients have A's bits where rank r is on the GPU of B's rank order[r]."""
    names = [order.index(rank) for rank in range(len(order))]
    again = replace(b, explicit_rings=tuple(moved(ring, names) for ring in b.explicit_rings))
    if b.explicit_trees:
        trees = ({names[r]: moved(below, names) for r, below in enumerate(t)} for t in b.explicit_trees)
        again = replace(again, explicit_trees=tuple(tuple(t[r] for r in range(len(order))) for t in trees))
    pairs = (zip(*(reduced(each, t).values() for t in (a, again)), strict=True) for each in layout.buckets)
    return all(torch.equal(one, other) for each in pairs for one, other in each)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_ring_that_changes_moves_its_elements_alone(op: str) -> None:
    """Channel 2 has another ring; what lies on channel 0 keeps its bits."""
    layout = layout_of("reduce_scatter", op=op)
    bits = check(layout, of(FORTH, BACK, FORTH), of(FORTH, BACK, moved(FORTH)))
    assert [*bits.values()] == ["same bits", "may differ", "may differ"]
    assert {*check(layout, of(FORTH, BACK), of(FORTH, BACK)).values()} == {"same bits"}


CHAIN = [f"Trees [0] {rank + 1 if rank < 7 else -1}/-1/-1->{rank}->{rank - 1}" for rank in range(8)]


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        (of(FORTH, BACK), of(FORTH, BACK, protocol="ll"), True),
        (of(FORTH, BACK, version="2.28.9"), of(FORTH, BACK), True),  # cells of 16 and of 32 KiB
        (of(FORTH, BACK), of(FORTH, BACK, BACK), True),
        (of(FORTH), of(FORTH, algorithm="tree", lines=CHAIN), True),
        (of(FORTH, BACK), of(FORTH[1:] + FORTH[:1], BACK), False),  # a ring has no first rank
    ],
)
def test_protocols_versions_channels_and_algorithms(a: Topology, b: Topology, differ: bool) -> None:
    assert ("may differ" in check(BOTH, a, b).values()) == differ


def test_the_order_of_ranks_that_restores_the_bits() -> None:
    a, b = of(FORTH, BACK, (0, 2, 4, 6, 1, 3, 5, 7)), of(*map(moved, (FORTH, BACK, (0, 2, 4, 6, 1, 3, 5, 7))))
    found = diff_topologies(BOTH, a, b)
    assert found.outcome == "different"
    assert found.rank_order is not None
    assert restored(BOTH, a, b, found.rank_order)
    assert not restored(BOTH, a, b, range(8))
    assert f"ranks {' '.join(map(str, found.rank_order))}; NCCL numbers nodes" in str(found)


def test_a_step_of_fsdp2() -> None:
    """Its gradients differ where they may, and have the first cluster's bits in the order that is suggested."""

    def step() -> tuple[Layout, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(1100, 64), nn.LayerNorm(64), nn.Linear(64, 1100), nn.GELU())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)), mp_policy=policy)
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randint(0, 1100, (32, 16), generator=generator)).float().square().mean().backward()
        return eager_layout(model), {k: each.grad.full_tensor() for k, each in model.named_parameters()}

    rings = (0, 3, 2, 1, 4, 7, 6, 5), (1, 0, 3, 2, 5, 4, 7, 6)
    first, other_nccl, other_gpus = of(*rings), of(*rings, version="2.28.9"), of(*map(moved, rings))
    layout, gradients = run_cluster(step, first)[0]
    for other, num_same in ((other_nccl, 4), (other_gpus, 0)):
        found, (_, others) = diff_topologies(layout, first, other), run_cluster(step, other)[0]
        assert [each.bits for each in found.gradients].count("same bits") == num_same
        for each in found.gradients:
            assert torch.equal(gradients[each.fqn], others[each.fqn]) == (each.bits == "same bits")
    assert found.rank_order is not None
    names = [found.rank_order.index(rank) for rank in range(8)]
    _, again = run_cluster(step, of(*(moved(moved(ring), names) for ring in rings)))[0]
    assert all(torch.equal(gradients[fqn], again[fqn]) for fqn in gradients)


def test_trees_are_restored_as_well() -> None:
    def lines(children: Sequence[Ring]) -> list[str]:
        parent = {child: rank for rank, each in enumerate(children) for child in each}
        cells = ("/".join(map(str, [*each, -1, -1, -1][:3])) for each in children)
        return [f"Trees [0] {cell}->{rank}->{parent.get(rank, -1)}" for rank, cell in enumerate(cells)]

    tree = [(1, 4), (2,), (3,), (), (5, 6), (), (7,), ()]
    other = {MOVED[rank]: moved(each) for rank, each in enumerate(tree)}
    layout = layout_of("all_reduce")
    a = of(FORTH, lines=lines(tree), algorithm="tree")
    b = of(FORTH, lines=lines([other[rank] for rank in range(8)]), algorithm="tree")
    found = diff_topologies(layout, a, b)
    assert {each.bits for each in found.gradients} == {"may differ"}
    assert found.rank_order is not None
    assert restored(layout, a, b, found.rank_order)
    chain = diff_topologies(layout, a, of(FORTH, lines=lines([*((r + 1,) for r in range(7)), ()]), algorithm="tree"))
    assert chain.remedy == "no order of ranks restores them: B adds bucket 0 in sums of another shape"


def test_no_order_where_rings_are_alike_only_in_one_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = of(FORTH, BACK), of(FORTH, FORTH)
    those = "that restore the first elements of bucket 0 restores all of bucket 0"
    remedy = diff_topologies(BOTH, *clusters).remedy
    assert remedy == f"no order of ranks restores them: none of the 16 {those}"
    monkeypatch.setattr("graphpasses.simulate.topology_diff._MAX_ORDERS", 3)
    remedy = diff_topologies(BOTH, *clusters).remedy
    assert remedy == f"no order of ranks was found, and not all were tried: none of the 3 {those}"


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_an_order_is_found_where_any_of_all_restores(collective: str) -> None:
    parameters = [("w", (4, 12_000), 0)]
    layout = Layout((make_bucket_layout(collective, range(4), "sum", torch.bfloat16, parameters),))
    draw, outcomes = random.Random(0), set()
    for _ in range(4):
        rings = [(0, *draw.sample(range(1, 4), 3)) for _ in range(2)]
        names = draw.sample(range(4), 4)
        others = [moved(ring, names) for ring in rings]
        for again in (others, [others[0], (0, *draw.sample(range(1, 4), 3))]):
            a, b = (topology_from_log(log_of(each), gpus_per_node=4, **RING) for each in (rings, again))
            found = diff_topologies(layout, a, b)
            exists = any(restored(layout, a, b, order) for order in itertools.permutations(range(4)))
            assert exists == (found.rank_order is not None or found.outcome == "equal")
            outcomes.add(exists)
    assert outcomes == {True, False}


def test_sums_that_commute() -> None:
    """Of three ranks ``(a + b) + c`` is ``(b + a) + c``; where each is multiplied first, the first rounds alone."""
    a, b = (topology_from_log(log_of([ring]), gpus_per_node=3, **RING) for ring in ((0, 1, 2), (0, 2, 1)))
    layout = layout_of("reduce_scatter", num_ranks=3)
    assert {*check(layout, a, b).values()} == {"same bits"}
    assert {
        each.bits for each in diff_topologies(layout_of("reduce_scatter", num_ranks=3, op="avg"), a, b).gradients
    } == {"may differ"}


TAKEN = "ReduceScatter: {} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{0..{}}}"
NAMED = ["NCCL_ALGO set by environment to Ring", "NCCL_PROTO set by environment to Simple"]
PLUGIN = "NCCL INFO TUNER/Plugin: Using nccl_ofi_tuner (v3)"
SIZE = BOTH.buckets[0].num_bytes


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([TAKEN.format(SIZE, "RING", "SIMPLE", 1)], ""),
        (NAMED, ""),
        ([*NAMED, "NCCL INFO TUNER/Plugin: Using internal tuner plugin."], ""),
        (
            [*NAMED, PLUGIN],
            "B: for reduce_scatter of 70,002 bytes the tuner plugin nccl_ofi_tuner may choose",
        ),
        ([TAKEN.format(SIZE, "RING", "SIMPLE", 1), PLUGIN], ""),
        (
            [TAKEN.format(SIZE, "NVLS", "SIMPLE", 1)],
            "B: NCCL takes NVLS for reduce_scatter (sum) of 35,001 elements",
        ),
        ([TAKEN.format(SIZE, "PAT", "SIMPLE", 1)], "B: NCCL takes PAT for reduce_scatter"),
        ([TAKEN.format(SIZE, "COLLNET_DIRECT", "SIMPLE", 1)], "B: NCCL takes COLLNET_DIRECT for"),
        (
            [TAKEN.format(SIZE + 2, "RING", "SIMPLE", 1)],
            "B: what NCCL takes for reduce_scatter of",
        ),
        (
            [TAKEN.format(SIZE, "RING", "SIMPLE", 0)],
            "B: for reduce_scatter of 70,002 bytes NCCL took other channels than the 2 that the model has",
        ),
    ],
)
def test_what_is_not_known_is_not_equal(lines: list[str], reason: str) -> None:
    layout = layout_of("reduce_scatter")
    b = of(FORTH, BACK, lines=lines, algorithm="auto", protocol="auto")
    found = diff_topologies(layout, of(FORTH, BACK), b)
    assert (found.outcome, found.remedy) == ("not compared" if reason else "equal", "")
    for each in found.gradients:
        assert each.reason.startswith(reason)
        assert bool(each.reason) == bool(reason)


def test_groups_whose_rings_are_in_no_log() -> None:
    parameters = [("w", (8, 4000), 0)]
    four, pair = (
        make_bucket_layout("reduce_scatter", ranks, "sum", torch.bfloat16, parameters)
        for ranks in ((0, 1, 2, 3), (0, 4))
    )
    a, b = of(FORTH, BACK), of(*map(moved, (FORTH, BACK)))
    (each,) = diff_topologies(Layout((four,)), a, b).gradients
    assert (each.bits, each.reason) == (
        "unknown",
        "A: its rings are those of all 8 ranks, not of this group of 4",
    )
    assert not diff_topologies(Layout((pair,)), a, b)  # a + b
    tree = replace(four, op="tree:float32")
    assert diff_topologies(Layout((tree,)), a, b).outcome == "equal"
    found: TopologyDiff = diff_topologies(Layout((four, layout_of("reduce_scatter").buckets[0])), a, b)
    assert "that has A's bits, of those that are known: give ranks" in found.remedy


def test_no_order_is_searched_for_groups() -> None:
    layout = layout_of("reduce_scatter")
    pair = replace(layout.buckets[0], ranks=(0, 1, 4, 5))
    rail, cross = (Topology(8, gpus_per_node=4, mode=mode) for mode in ("rail", "cross_nic"))
    found = diff_topologies(Layout((*layout.buckets, pair)), rail, cross)
    assert (found.rank_order, found.remedy) == (
        None,
        "orders of ranks are searched where all buckets are over all ranks",
    )


def test_other_numbers_of_ranks() -> None:
    with pytest.raises(TopologyError, match=r"^A has 8 ranks and B 3; bits are compared on equal numbers$"):
        diff_topologies(BOTH, of(FORTH), topology_from_log(log_of([(0, 1, 2)]), gpus_per_node=3))


def test_settings_that_are_not_modelled() -> None:
    with pytest.raises(TopologyError, match=r"has NCCL_BUFFSIZE set, which changes chunks and is not modelled$"):
        of(FORTH, lines=["n0:1:1 [0] NCCL INFO NCCL_BUFFSIZE set by environment to 1048576."])
    with pytest.raises(TopologyError, match=r"several versions of NCCL, 2\.27\.3 and 2\.30\.3; give one run's$"):
        of(FORTH, lines=["NCCL version 2.27.3+cuda12.9"])
