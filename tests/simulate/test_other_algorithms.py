"""Where eager's reduction and the graph's get other algorithms."""

from __future__ import annotations

import torch

from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.simulate import Hardware, Topology, other_algorithms, predict

NODE = Topology(8, gpus_per_node=8, algorithm="auto", protocol="auto")
SPARSE = Topology(16, gpus_per_node=1, num_search_rings=8, algorithm="auto", protocol="auto")
PARAMETERS = [("w1", (4096, 1000), 0), ("b1", (4096,), 0), ("w2", (1000, 4096), 0)]


def layout(topology: Topology, op: str, collective: str = "all_reduce", *, reverse: bool = False) -> Layout:
    order = PARAMETERS[::-1] if reverse else PARAMETERS
    ranks = range(topology.num_ranks)
    return Layout((make_bucket_layout(collective, ranks, op, torch.bfloat16, order),))


def test_premul_sum_is_no_nvls() -> None:
    (found,) = other_algorithms(layout(NODE, "sum"), NODE)
    assert (found.bucket, found.eager.algorithm, found.graph.algorithm) == (0, "ring", "nvls")
    assert str(found) == (
        "bucket 0, all_reduce of 16,392,192 bytes: NCCL takes ring ll128 for eager's PREMUL_SUM and nvls simple for "
        "the graph's SUM; set NCCL_ALGO=allreduce:ring (NCCL_ALGO=ring before 2.24) for both"
    )


def test_what_is_said_to_set_helps() -> None:
    ring = Topology(8, 8, algorithm="auto", protocol="auto", hardware=Hardware(algorithms="allreduce:ring"))
    assert other_algorithms(layout(ring, "sum"), ring) == ()


def test_one_op_on_both_sides_is_one_algorithm() -> None:
    assert other_algorithms(layout(NODE, "avg"), NODE) == ()
    assert other_algorithms(layout(NODE, "sum"), Topology(8, gpus_per_node=8)) == ()
    rail = Topology(16, gpus_per_node=8, algorithm="auto", protocol="auto")
    assert other_algorithms(layout(rail, "sum", "reduce_scatter"), rail) == ()


def test_premul_sum_is_no_pat() -> None:
    small = Layout((make_bucket_layout("reduce_scatter", range(16), "sum", torch.bfloat16, [("w", (40000,), 0)]),))
    (found,) = other_algorithms(small, SPARSE)
    assert (found.eager.algorithm, found.graph.algorithm) == ("ring", "pat")


def test_predictions_name_both_algorithms_and_what_to_set() -> None:
    (first, *rest) = predict(layout(NODE, "avg"), layout(NODE, "sum"), NODE).reordered
    assert first.reason == (
        "avg → sum, ring → nvls: set NCCL_ALGO=allreduce:ring (NCCL_ALGO=ring before 2.24) for both"
    )
    assert len(rest) == 2
    fixed = Topology(8, gpus_per_node=8)
    assert predict(layout(NODE, "avg"), layout(NODE, "sum"), fixed).reordered[0].reason == "avg → sum"


def test_moves_in_an_order_that_is_not_modelled_are_found_in_whole() -> None:
    moved = predict(layout(NODE, "sum"), layout(NODE, "sum", reverse=True), NODE).reordered
    assert {each.reason for each in moved} == {"the order of nvls is not modelled"}
    assert all(each.num_elements == each.num_elements_in_all for each in moved)
    assert not predict(layout(NODE, "sum"), layout(NODE, "sum"), NODE)


def test_a_buckets_size_decides_the_protocol() -> None:
    """The same place in buckets of other sizes: another protocol, other channels."""
    rail = Topology(16, gpus_per_node=8, algorithm="auto", protocol="auto")
    small, large = (
        Layout((make_bucket_layout("reduce_scatter", range(16), "avg", torch.bfloat16, PARAMETERS[:num]),))
        for num in (1, 3)
    )
    assert [each.fqn for each in predict(small, large, rail).reordered][:1] == ["w1"]
