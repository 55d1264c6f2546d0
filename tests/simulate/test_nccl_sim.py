"""The nccl_sim backend in four real processes: one launch, many checks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from graphpasses.parity.launch import run_ranks
from graphpasses.simulate import Topology, configure, default_topology
from graphpasses.simulate.collectives import reduce_parts, simulate_reduce_scatter
from graphpasses.simulate.nccl import reduction_parts
from tests.helpers.models import same_bits
from tests.helpers.reductions import simulate_all_reduce

NUM_RANKS = 4
COUNT = 50_001


def make_inputs(num_ranks: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(num_ranks)]


def check_reductions() -> None:
    rank = dist.get_rank()
    topology = default_topology(NUM_RANKS)
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64):
        inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, dtype)
        for name, op in ops.items():
            output = torch.empty(COUNT, dtype=dtype)
            dist.reduce_scatter_single(output, inputs[rank].clone(), op=op)
            assert same_bits(output, simulate_reduce_scatter(inputs, topology, name)[rank]), (dtype, name)
            buffer = inputs[rank].clone()
            dist.all_reduce(buffer, op=op)
            assert same_bits(buffer, simulate_all_reduce(inputs, topology, name)), (dtype, name)


def check_other_reductions() -> None:
    rank = dist.get_rank()
    topology = default_topology(NUM_RANKS)
    inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, torch.bfloat16)
    expected = simulate_reduce_scatter(inputs, topology)[rank]

    output = torch.empty_like(expected)
    dist.reduce_scatter(output, list(inputs[rank].chunk(NUM_RANKS)))
    assert same_bits(output, expected)

    scaled = torch.empty_like(expected)
    dist.reduce_scatter_single(scaled, inputs[rank], op=dist.ReduceOp.PREMUL_SUM(1 / 3))
    assert same_bits(scaled, simulate_reduce_scatter(inputs, topology, "premul_sum", factor=1 / 3)[rank])

    buffer = inputs[rank].clone()
    dist.reduce(buffer, dst=2)
    parts = reduction_parts(topology, "reduce", buffer.numel(), 2, 2)
    assert same_bits(buffer, reduce_parts(inputs, parts, topology) if rank == 2 else inputs[rank])

    uneven = torch.zeros(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((root + 1,), float(rank)) for root in range(NUM_RANKS)])
    assert uneven.tolist() == [6.0] * (rank + 1)

    # Not contiguous, and of no elements.
    square = torch.full((3, 5), float(rank)).t()
    dist.all_reduce(square)
    assert square.tolist() == [[6.0] * 3] * 5
    dist.all_reduce(torch.empty(0))

    with pytest.raises(NotImplementedError, match=r"NCCL has no RedOpType.BAND; it has sum, avg"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match=r"reduce_scatter needs an input of 4 times the output's 2 torch.float32"):
        dist.reduce_scatter_single(torch.empty(2), torch.empty(7))


def check_differs_from_gloo() -> None:
    gloo = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, torch.bfloat16)
    ours, theirs = torch.empty(2, COUNT, dtype=torch.bfloat16)
    dist.reduce_scatter_single(ours, inputs[rank])
    dist.reduce_scatter_single(theirs, inputs[rank], group=gloo)
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    assert not torch.equal(ours, theirs)


def check_async() -> None:
    buffer = torch.full((3,), float(dist.get_rank()))
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert buffer.tolist() == [6.0] * 3
    assert work.get_future().wait()[0] is buffer


def check_functional() -> None:
    rank = dist.get_rank()
    group = dist.group.WORLD
    topology = default_topology(NUM_RANKS)
    name = group.group_name
    ops, wait = torch.ops._c10d_functional, funcol.wait_tensor
    inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, torch.bfloat16)
    mine = inputs[rank]
    scattered = simulate_reduce_scatter(inputs, topology, "avg")[rank]
    reduced = simulate_all_reduce(inputs, topology)

    assert same_bits(wait(ops.reduce_scatter_tensor(mine, "avg", NUM_RANKS, name)), scattered)
    outputs = ops.reduce_scatter_tensor_coalesced([mine, mine], "avg", NUM_RANKS, name)
    assert all(same_bits(wait(output), scattered) for output in outputs)
    out = torch.empty_like(scattered)
    wait(ops.reduce_scatter_tensor_out(mine, "avg", NUM_RANKS, name, out=out))
    assert same_bits(out, scattered)
    assert same_bits(wait(ops.all_reduce(mine, "sum", name)), reduced)
    assert same_bits(wait(ops.all_reduce_(mine.clone(), "sum", name)), reduced)
    for output in ops.all_reduce_coalesced([mine, mine], "sum", name):
        assert same_bits(wait(output), reduced)
    for output in ops.all_reduce_coalesced_([mine.clone(), mine.clone()], "sum", name):
        assert same_bits(wait(output), reduced)

    whole = torch.stack(inputs)
    assert same_bits(wait(ops.all_gather_into_tensor(mine, NUM_RANKS, name)), whole.view(-1))
    for output in ops.all_gather_into_tensor_coalesced([mine, mine], NUM_RANKS, name):
        assert same_bits(wait(output), whole.view(-1))
    out = torch.empty_like(whole.view(-1))
    wait(ops.all_gather_into_tensor_out(mine, NUM_RANKS, name, out=out))
    assert same_bits(out, whole.view(-1))
    exchanged = wait(ops.all_to_all_single(mine, [COUNT] * NUM_RANKS, [COUNT] * NUM_RANKS, name))
    assert same_bits(exchanged, whole.view(NUM_RANKS, NUM_RANKS, -1)[:, rank].reshape(-1))
    assert same_bits(wait(ops.broadcast(mine, 1, name)), inputs[1])


def check_data_movement() -> None:
    rank = dist.get_rank()
    mine = torch.full((2,), rank, dtype=torch.bfloat16)
    listed = [torch.empty_like(mine) for _ in range(NUM_RANKS)]
    every = [[float(other)] * 2 for other in range(NUM_RANKS)]
    dist.all_gather(listed, mine)
    assert [t.tolist() for t in listed] == every
    dist.all_to_all(listed, [mine] * NUM_RANKS)
    assert [t.tolist() for t in listed] == every
    for tensor in listed:
        tensor.zero_()
    dist.gather(mine, listed if rank == 3 else None, dst=3)
    assert [t.tolist() for t in listed] == (every if rank == 3 else [[0.0] * 2] * NUM_RANKS)
    out = torch.empty_like(mine)
    dist.scatter(out, listed if rank == 3 else None, src=3)
    assert out.tolist() == mine.tolist()
    dist.broadcast(out, src=2)
    assert out.tolist() == [2.0, 2.0]
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(out, 0)
        assert out.tolist() == [0.0, 0.0]
    objects = [None] * NUM_RANKS
    dist.all_gather_object(objects, rank)
    assert objects == list(range(NUM_RANKS))

    # Of other dtypes, not contiguous, of no elements, and of sizes that differ between the ranks.
    whole = torch.zeros(NUM_RANKS, 3, dtype=torch.bool).t()
    dist.all_gather_single(whole, torch.tensor([rank == 1, True, rank == 2]))
    assert whole.reshape(NUM_RANKS, 3).tolist() == [[r == 1, True, r == 2] for r in range(NUM_RANKS)]
    columns = list(torch.zeros(2, NUM_RANKS).unbind(1))
    dist.all_gather(columns, torch.full((2,), float(rank)))
    assert [t.tolist() for t in columns] == every
    dist.all_gather_single(torch.empty(0), torch.empty(0))
    dist.broadcast(torch.empty(0), src=0)
    received = torch.zeros(NUM_RANKS * rank, 2)
    dist.all_to_all_single(received, torch.full((6, 2), float(rank)), [rank] * NUM_RANKS, list(range(NUM_RANKS)))
    assert received.tolist() == [[float(sender)] * 2 for sender in range(NUM_RANKS) for _ in range(rank)]
    lists = [[torch.zeros(1), torch.zeros(2)] for _ in range(NUM_RANKS)]
    dist.group.WORLD.allgather_coalesced(lists, [torch.full((1,), float(rank)), torch.full((2,), float(rank))])
    assert [[t.tolist() for t in tensors] for tensors in lists] == [[[r[0]], r] for r in every]
    with pytest.raises(ValueError, match=r"all_gather needs an output of 4 times the input's 2 torch.float32"):
        dist.all_gather_single(torch.empty(7), torch.empty(2))
    with pytest.raises(ValueError, match="all_to_all cannot split 5 rows evenly over 4 ranks"):
        dist.all_to_all_single(torch.empty(5), torch.empty(5))
    dist.barrier()


def check_collectives_keep_no_tensor() -> None:
    """A thread of gloo that frees a Python tensor while the interpreter exits aborts the process."""
    name, ops, wait = dist.group.WORLD.group_name, torch.ops._c10d_functional, funcol.wait_tensor
    collectives: list[Callable[[Tensor, Tensor], object]] = [
        lambda part, whole: dist.all_reduce(part),
        lambda part, whole: dist.reduce_scatter_single(part, whole),
        lambda part, whole: dist.all_gather_single(whole, part, async_op=True).wait(),
        lambda part, whole: dist.all_gather_single(whole, part, async_op=True),
        lambda part, whole: dist.all_gather(list(whole.chunk(NUM_RANKS)), part),
        lambda part, whole: dist.all_to_all_single(whole, whole.clone()),
        lambda part, whole: dist.broadcast(whole, src=1),
        lambda part, whole: wait(ops.all_gather_into_tensor(part, NUM_RANKS, name)),
        lambda part, whole: wait(ops.reduce_scatter_tensor(whole, "avg", NUM_RANKS, name)),
        lambda part, whole: wait(ops.all_reduce_(whole, "avg", name)),
    ]
    for _ in range(20):
        for collective in collectives:
            part, whole = torch.ones(4), torch.ones(4 * NUM_RANKS)
            kept = [weakref.ref(part), weakref.ref(whole)]
            collective(part, whole)
            del part, whole
            assert [reference() for reference in kept] == [None, None]


def check_groups() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    assert shard.topology == Topology(2, gpus_per_node=2, mode="shared")
    assert replicate.topology == Topology(2, gpus_per_node=1)
    assert dist.get_backend(shard) == "nccl_sim"
    inputs = make_inputs(2, 2 * COUNT, torch.bfloat16)
    output = torch.empty(COUNT, dtype=torch.bfloat16)
    dist.reduce_scatter_single(output, inputs[rank % 2], group=shard)
    assert same_bits(output, simulate_reduce_scatter(inputs, shard.topology)[rank % 2])

    three = dist.new_group([3, 0, 1])
    if rank != 2:
        # torch sorts the ranks of a group.
        assert three.topology == default_topology(NUM_RANKS).restrict([0, 1, 3])

    own = Topology(NUM_RANKS, gpus_per_node=2, mode="cross_nic", num_channels=4, fused_avg=False)
    custom = dist.new_group(pg_options=own)
    inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, torch.bfloat16)
    dist.reduce_scatter_single(output, inputs[rank], op=dist.ReduceOp.AVG, group=custom)
    assert same_bits(output, simulate_reduce_scatter(inputs, own, "avg")[rank])

    configure(Topology(NUM_RANKS, gpus_per_node=4))
    assert shard.topology == Topology(2, gpus_per_node=2, mode="shared")
    assert replicate.topology == shard.topology
    assert custom.topology == own
    configure(Topology(8, gpus_per_node=4))
    with pytest.raises(ValueError, match="the topology has 8 ranks, but the process group has 4"):
        dist.all_reduce(output)
    configure(None)


def check_dtensor() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    inputs = make_inputs(NUM_RANKS, NUM_RANKS * COUNT, torch.bfloat16)
    partial = DTensor.from_local(inputs[rank], mesh, [Partial()])
    scattered = partial.redistribute(placements=[Shard(0)])
    assert same_bits(scattered.to_local(), simulate_reduce_scatter(inputs, default_topology(NUM_RANKS))[rank])
    replicated = partial.redistribute(placements=[Replicate()])
    assert same_bits(replicated.to_local(), simulate_all_reduce(inputs, default_topology(NUM_RANKS)))
    assert torch.equal(
        scattered.full_tensor()[:COUNT], scattered.redistribute(placements=[Replicate()]).to_local()[:COUNT]
    )


def make_gradients(configured: Topology | None, dims: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
    configure(configured)
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 256)).square().mean().backward()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    optimizer.step()
    configure(None)
    return gradients


def check_fully_shard() -> None:
    rail = make_gradients(None, (NUM_RANKS,))
    shared = make_gradients(Topology(NUM_RANKS, gpus_per_node=4), (NUM_RANKS,))
    for a, b in zip(rail, shared, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(rail, shared, strict=True))
    hybrid = make_gradients(None, (2, 2))
    for a, b in zip(rail, hybrid, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=1e-4)


CHECKS: list[Callable[[], None]] = [
    check_reductions,
    check_other_reductions,
    check_differs_from_gloo,
    check_async,
    check_functional,
    check_data_movement,
    check_collectives_keep_no_tensor,
    check_groups,
    check_dtensor,
    check_fully_shard,
]


def run_checks() -> list[str]:
    for check in CHECKS:
        check()
    return [check.__name__ for check in CHECKS]


@pytest.mark.multiprocess
def test_backend() -> None:
    """One launch for all checks: importing torch and forming a group take longer than they do."""
    names = [check.__name__ for check in CHECKS]
    assert run_ranks(run_checks, NUM_RANKS, backend="nccl_sim", timeout=120) == [names] * NUM_RANKS
