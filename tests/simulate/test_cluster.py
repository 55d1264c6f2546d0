"""A cluster of threads: each rank is by itself, reductions are those of the rings, and what would hang raises."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import ClusterError
from graphpasses.simulate import Topology, run_cluster, share, step_for_rank
from graphpasses.simulate.collectives import reduce_parts, simulate_reduce_scatter
from graphpasses.simulate.nccl import reduction_parts
from tests.helpers.reductions import simulate_all_reduce

RAIL = Topology(8, gpus_per_node=4)
COUNT = 5_000


def inputs_of(num_ranks: int, numel: int) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(num_ranks)]


@pytest.mark.parametrize("topology", [RAIL, Topology(8, gpus_per_node=4, mode="cross_nic")])
def test_reductions_are_those_of_the_rings(topology: Topology) -> None:
    inputs = inputs_of(8, 8 * COUNT)

    def reduce() -> tuple[Tensor, Tensor, Tensor]:
        mine, shard = inputs[dist.get_rank()].clone(), torch.empty(COUNT, dtype=torch.bfloat16)
        dist.reduce_scatter_single(shard, mine, op=dist.ReduceOp.AVG)
        root = mine.clone()
        dist.reduce(root, dst=3)
        dist.all_reduce(mine)
        return shard, mine, root

    shards, sums, roots = zip(*run_cluster(reduce, topology), strict=True)
    for shard, expected in zip(shards, simulate_reduce_scatter(inputs, topology, "avg"), strict=True):
        assert torch.equal(shard, expected)
    assert all(torch.equal(each, simulate_all_reduce(inputs, topology)) for each in sums)
    assert torch.equal(roots[2], inputs[2])
    parts = reduction_parts(topology, "reduce", 8 * COUNT, 2, destination=3)
    assert torch.equal(roots[3], reduce_parts(inputs, parts, topology))


def test_what_moves_without_being_added() -> None:
    def move() -> list[object]:
        rank = dist.get_rank()
        gathered = torch.empty(4, dtype=torch.long)
        dist.all_gather_single(gathered, torch.tensor([rank]))
        swapped = torch.empty(4, dtype=torch.long)
        dist.all_to_all_single(swapped, 10 * rank + torch.arange(4))
        told = [f"from {rank}"]
        dist.broadcast_object_list(told, src=2)
        dist.barrier()
        return [gathered.tolist(), swapped.tolist(), *told]

    results = run_cluster(move, Topology(4, gpus_per_node=2))
    assert results[1] == [[0, 1, 2, 3], [1, 11, 21, 31], "from 2"]


def test_groups_have_topologies_of_their_own() -> None:
    inputs = inputs_of(8, 4 * COUNT)

    def reduce() -> Tensor:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        shard = torch.empty(COUNT, dtype=torch.bfloat16)
        dist.reduce_scatter_single(shard, inputs[dist.get_rank()], group=mesh["shard"].get_group())
        dist.all_reduce(shard, group=mesh["replicate"].get_group())
        return shard

    results = run_cluster(reduce, RAIL)
    nodes = [simulate_reduce_scatter(part, RAIL.restrict(range(4))) for part in (inputs[:4], inputs[4:])]
    assert all(torch.equal(results[rank], nodes[0][rank % 4] + nodes[1][rank % 4]) for rank in range(8))


def test_every_rank_has_random_numbers_of_its_own() -> None:
    def draw() -> list[float]:
        torch.manual_seed(dist.get_rank())
        first = torch.rand(())
        dist.barrier()
        return [first.item(), torch.rand(()).item()]

    before = torch.get_rng_state()
    results = run_cluster(draw, RAIL)
    assert torch.equal(torch.get_rng_state(), before)
    for rank, numbers in enumerate(results):
        assert numbers == torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist()


def test_dtensors_of_a_later_cluster_are_not_taken_for_an_earlier_ones() -> None:
    """Threads get the numbers of threads that are gone, and DTensor keeps what it knows of a mesh."""
    meshes = []

    def shard(order: list[int]) -> bool:
        mesh = init_device_mesh("cpu", (4,))
        meshes.append(mesh)
        whole = torch.arange(8.0)
        sharded = DTensor.from_local(whole.chunk(4)[dist.get_rank()], mesh, [Shard(0)])
        order.append(threading.get_ident())
        return torch.equal((sharded + sharded).full_tensor(), whole + whole)

    idents: list[list[int]] = [[], []]
    for order in idents:
        assert all(run_cluster(shard, Topology(4, gpus_per_node=2), order))
    assert len(set(meshes)) == 8


def test_share_makes_once() -> None:
    made = []

    def make() -> object:
        made.append(1)
        return object()

    results = run_cluster(lambda: share(make), RAIL)
    assert len(made) == len(set(map(id, results))) == 1


def test_one_rank_runs_at_a_time() -> None:
    running: set[int] = set()

    def run() -> None:
        for _ in range(5):
            running.add(dist.get_rank())
            assert len(running) == 1
            running.discard(dist.get_rank())
            dist.barrier()

    run_cluster(run, RAIL)


# ---- what goes wrong ----------------------------------------------------------------------------------


def only_rank_3(do: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        if dist.get_rank() == 3:
            do()
            return
        dist.all_reduce(torch.ones(2))

    return run


def test_a_rank_that_raises_is_named() -> None:
    def fail() -> None:
        raise ValueError("no such table")

    with pytest.raises(ClusterError) as caught:
        run_cluster(only_rank_3(fail), RAIL)
    first, *_, last = str(caught.value).strip().splitlines()
    assert (first, last) == ("rank 3 failed:", "ValueError: no such table")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_rank_that_issues_another_collective_is_named() -> None:
    with pytest.raises(ClusterError) as caught:
        run_cluster(only_rank_3(dist.barrier), RAIL)
    assert str(caught.value) == (
        "ranks issue different collectives: rank 3: barrier; ranks 0, 1, 2, 4, 5, 6, 7: "
        "all_reduce (sum) of 2 float32 (group of ranks 0, 1, 2, 3, 4, 5, 6, 7)"
    )


def test_a_rank_that_reduces_another_number_of_elements_is_named() -> None:
    with pytest.raises(ClusterError, match=r"rank 3: all_reduce \(sum\) of 1 float32; ranks 0, 1, 2, 4, "):
        run_cluster(only_rank_3(lambda: dist.all_reduce(torch.ones(1))), RAIL)


def test_ranks_that_wait_in_vain() -> None:
    def end() -> None: ...

    with pytest.raises(ClusterError) as caught:
        run_cluster(only_rank_3(end), RAIL)
    assert str(caught.value) == (
        "deadlock, ranks wait for each other: rank 3: not waiting: it has ended; ranks 0, 1, 2, 4, 5, 6, 7: "
        "in all_reduce (sum) of 2 float32 of the group of ranks 0, 1, 2, 3, 4, 5, 6, 7"
    )


def test_ranks_that_wait_in_two_groups() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        axis = "a" if dist.get_rank() == 0 else "b"
        dist.all_reduce(torch.ones(1), group=mesh[axis].get_group())

    with pytest.raises(ClusterError, match="deadlock, ranks wait for each other: rank 0: in all_reduce"):
        run_cluster(run, Topology(4, gpus_per_node=2))


def test_what_is_not_played() -> None:
    with pytest.raises(ClusterError, match="send and recv are not played"):
        run_cluster(only_rank_3(lambda: dist.send(torch.ones(1), 0)), RAIL)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Control-C raises, which pytest's workers prevent."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


# The second does not wake who waits, as a signal that comes just before.
@pytest.mark.parametrize("send", [interrupt, _thread.interrupt_main])
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_every_rank(send: Callable[[], None]) -> None:
    ended = []

    def run() -> None:
        if dist.get_rank() == 0:
            send()
        for _ in range(1_000):
            time.sleep(0.001)  # lets the main thread run, as an operator does
            dist.barrier()
        ended.append(dist.get_rank())

    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_cluster(run, RAIL)
    assert not ended
    assert threading.active_count() == num_threads
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not leave threads that wait for the rest."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        if thread.name == "rank 2":
            signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_cluster(dist.barrier, RAIL)
    assert threading.active_count() == num_threads


def test_share_outside_of_a_cluster() -> None:
    with pytest.raises(ClusterError, match="share is for the ranks of run_cluster"):
        share(object)


def test_the_backend_alone() -> None:
    with pytest.raises(ClusterError, match="nccl_threads is for ranks of run_cluster"):
        dist.init_process_group("nccl_threads", store=dist.HashStore(), rank=0, world_size=1)


# ---- one captured step for all ------------------------------------------------------------------------


def test_one_step_serves_ranks_of_other_groups() -> None:
    """With HSDP ranks of different groups share a graph; each trains as with its own."""

    def train() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        batch = torch.full((2, 8), float(dist.get_rank()))
        gradients = []
        for is_shared in (False, True):
            torch.manual_seed(0)
            model = simple_fsdp(torch.nn.Linear(8, 4), mesh, param_dtype=torch.float32)

            def capture(model: torch.nn.Module = model) -> object:
                return capture_train_step(lambda model, x: model(x).square().mean(), model, batch, check=False)

            step = step_for_rank(share(capture), model) if is_shared else capture()
            step(batch)
            gradients += [parameter.grad.full_tensor() for parameter in model.parameters()]
        return gradients

    for weight, bias, shared_weight, shared_bias in run_cluster(train, RAIL):
        assert weight.any()
        assert torch.equal(weight, shared_weight)
        assert torch.equal(bias, shared_bias)


def test_a_step_of_other_shapes_is_refused() -> None:
    def train() -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = simple_fsdp(torch.nn.Linear(4, 3, bias=False), mesh, param_dtype=torch.float32)
        batch = torch.ones(2, 4)
        step = share(lambda: capture_train_step(lambda model, x: model(x).mean(), model, batch, check=False))
        step_for_rank(step, model)

    with pytest.raises(
        ClusterError, match=r"this rank's shard of 'weight' has shape \(2, 4\); it has shape \(1, 4\)"
    ):
        run_cluster(train, Topology(2, gpus_per_node=2))


def test_errors_look_as_before() -> None:
    hook = sys.excepthook
    run_cluster(dist.get_rank, Topology(2, gpus_per_node=2))
    assert sys.excepthook is hook
