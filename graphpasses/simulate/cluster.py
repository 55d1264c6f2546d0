"""A whole cluster in one process: every rank is a thread, and reductions add in the order of NCCL's rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphpasses._torch.process_group import threads_are_ranks
from graphpasses.errors import ClusterError
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.scheduler import Call, RankScheduler, current
from graphpasses.simulate.thread_process_group import BACKEND

T = TypeVar("T")


def run_cluster(fn: Callable[..., T], topology: Topology, *args: Any) -> list[T]:
    """Calls ``fn(*args)`` on every rank of a simulated cluster, in threads of this process.

    ``torch.distributed`` is initialised in each, and what ``fn`` does with it (FSDP2, DTensor, captured steps,
    groups of some ranks) gives the bits that processes with the ``nccl_sim`` backend give. Each rank has the state
    of torch's random numbers that it would have by itself. All ranks share whatever else a process has once.

    Args:
        fn: what a rank does; it must wait for other ranks in collectives and in :func:`share` only.
        topology: of the world; groups of some ranks have :meth:`Topology.restrict`'s.
        args: arguments of ``fn``; all ranks get the same objects.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        ClusterError: a rank raised (it names the first, with its traceback; what was raised is its ``__context__``),
            ranks issue different collectives (it names those that issue another one than most, and both), or they
            deadlock.

    Example:
        >>> def rank_sum():
        ...     total = torch.tensor(dist.get_rank())
        ...     dist.all_reduce(total)
        ...     return total.item()
        >>> run_cluster(rank_sum, Topology(4, gpus_per_node=2))
        [6, 6, 6, 6]
    """
    scheduler = RankScheduler(topology)

    def play(rank: int) -> T:
        torch.set_num_threads(1)
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=topology.num_ranks)
            try:
                return fn(*args)
            finally:
                dist.destroy_process_group()

    with threads_are_ranks() as store:
        return scheduler.run(play)


def share(make: Callable[[], T]) -> T:
    """Returns on every rank what ``make`` returns on one: the same object, made once.

    All ranks of a :func:`run_cluster` call it; ``make`` must issue no collective.

    Example:
        >>> run_cluster(lambda: share(object), Topology(2, gpus_per_node=2)).count(None)
        0
    """
    scheduler = current.scheduler
    if scheduler is None:
        raise ClusterError("share is for the ranks of run_cluster")

    def give(calls: Sequence[Call]) -> None:
        made = make()
        for call in calls:
            call.result = made

    call = Call("share")
    scheduler.meet("share", tuple(range(scheduler.topology.num_ranks)), current.rank, call, give)
    made: T = call.result
    return made
