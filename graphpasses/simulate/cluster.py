"""A whole cluster in one process: every rank is a thread, and reductions add in the order of NCCL's rings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.group_ranks import mesh_group_names
from graphpasses._torch.process_group import threads_are_ranks
from graphpasses.errors import ClusterError
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import CapturedStep, get_state, is_collective
from graphpasses.roomy_stack import with_roomy_stack
from graphpasses.simulate.process_group import BACKEND
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.scheduler import Call, RankScheduler, current

T = TypeVar("T")

# Of the weights: fp32 shards, their gradients, and AdamW's two moments.
_STATE_COPIES = 4
# Of the largest bucket, on every rank: what was gathered and the parameters made of it, of the current bucket and of
# the next one; gradients, and what they are packed into; what the reduction adds up.
_BUCKET_COPIES = 8
# torch and what it imports.
_PROCESS = 400 * 2**20


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
        ClusterError: a rank raised (it names the first; what was raised is its ``__context__``, and unless that is an
            error of graphpasses, the message has its traceback),
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

    @with_roomy_stack
    def play(rank: int) -> T:
        torch.set_num_threads(1)
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=topology.num_ranks)
            try:
                return fn(*args)
            finally:
                dist.destroy_process_group()

    # init_process_group lets errors begin with "[rank0]: ", of each rank again, and for good.
    with threads_are_ranks() as store, mock.patch.object(sys, "excepthook", sys.excepthook):
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


def step_for_rank(step: CapturedStep, model: nn.Module) -> CapturedStep:
    """Returns a step that another rank captured, for this rank's model.

    To trace and rewrite one step takes as long as hundreds of them; ranks with shards of equal shapes need it once.
    The rank that captures for all cannot run an eager step without them: it captures with ``check=False``. Other
    ranks, which built their models as it did, get a step of the same graph with the collectives of their groups.

    Raises:
        ClusterError: a parameter's shard has another shape here, as where the ranks do not divide its size; such
            ranks capture their own.

    Example:
        >>> def loss_on_this_rank():
        ...     model, steps = nn.Linear(4, 4), share(list)
        ...     batch = torch.full((2, 4), float(dist.get_rank()))
        ...     loss_fn = lambda m, x: (m(x) * 0 + x).sum()
        ...     if not steps:
        ...         steps.append(graphpasses.capture_train_step(loss_fn, model, batch, check=False))
        ...     return step_for_rank(steps[0], model)(batch).item()
        >>> run_cluster(loss_on_this_rank, Topology(2, gpus_per_node=2))
        [0.0, 8.0]
    """
    names: dict[str, str] = {}
    for fqn, *_ in step.identity.parameters:
        theirs, ours = (get_state(each, fqn) for each in (step.model, model))
        if not isinstance(theirs, DTensor) or not isinstance(ours, DTensor):
            continue
        shapes = [tuple(tensor.to_local().shape) for tensor in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise ClusterError(
                f"the step was captured where this rank's shard of {fqn!r} has shape {shapes[0]}; it has shape "
                f"{shapes[1]} here. Capture one step for each of the shapes that ranks have"
            )
        names.update(zip(*map(mesh_group_names, (theirs.device_mesh, ours.device_mesh)), strict=True))
    if all(name == own for name, own in names.items()):
        return step.for_model(model)
    copy = step.copy().for_model(model, names)
    for node in copy.graph.nodes:
        if is_collective(node):
            node.args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
    copy.module.recompile()
    return copy


def cluster_memory(bucket_numels: Sequence[int], num_ranks: int, dtype: torch.dtype) -> int:
    """Estimates the bytes that a simulated cluster needs to train a model, activations apart."""
    state = sum(bucket_numels) * torch.float32.itemsize * _STATE_COPIES
    unsharded = (bucket_numels[-1] + _BUCKET_COPIES * max(bucket_numels)) * dtype.itemsize
    return _PROCESS + state + num_ranks * unsharded


def check_memory(model: nn.Module, plan: BucketPlan, num_ranks: int, dtype: torch.dtype) -> None:
    numels = [sum(get_state(model, fqn).numel() for fqn in bucket.fqns) for bucket in plan.resolve(model)]
    needed, available = cluster_memory(numels, num_ranks, dtype), _available()
    if available is not None and needed > available:
        raise ClusterError(
            f"{num_ranks} ranks of this model need about {needed / 1e9:.1f} GB, activations apart; "
            f"{available / 1e9:.1f} GB are available. Play fewer ranks, fewer layers, or shard into smaller buckets"
        )


def _available() -> int | None:
    """Bytes that could be allocated without swapping, as Linux reports."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
