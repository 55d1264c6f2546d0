"""A whole cluster in one process: every rank is a thread, and reductions add in the order of NCCL's rings.

One rank runs at a time. It hands over where it waits for others, so runs are repeatable, ranks never meet inside a
library that was not made for threads, and a rank that waits in vain is seen at once.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.thread_ranks import serve_collectives_without_tensors, threads_are_ranks
from graphpasses.errors import ClusterError
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.collectives import reduce_parts, simulate_all_reduce, simulate_reduce_scatter
from graphpasses.simulate.nccl import reduction_parts
from graphpasses.simulate.ring_process_group import RingProcessGroup
from graphpasses.simulate.rings import Topology

__all__ = ["run_cluster", "share"]

T = TypeVar("T")
_BACKEND = "nccl_threads"
_ONLY_COLLECTIVES = "ranks of a simulated cluster meet in collectives only; send and recv are not played"


def run_cluster(fn: Callable[..., T], topology: Topology, *args: Any) -> list[T]:
    """Calls ``fn(*args)`` on every rank of a simulated cluster, in threads of this process.

    ``torch.distributed`` is initialised in each, and what ``fn`` does with it (FSDP2, DTensor, captured steps,
    groups of some ranks) gives the bits that processes with the ``nccl_sim`` backend give. Each rank has the state
    of torch's random numbers that it would have by itself. What else a process has once, all ranks share.

    Args:
        fn: what a rank does; it must not wait for another rank otherwise than by a collective or :func:`share`.
        topology: of the world; groups of some ranks have :meth:`Topology.restrict`'s.
        args: arguments of ``fn``; all ranks get the same objects.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        ClusterError: a rank raised (it names the first, with its traceback), ranks issue different collectives (it
            names those that issue another one than most, and both), or they wait for each other in vain.

    Example:
        >>> def rank_sum():
        ...     total = torch.tensor(dist.get_rank())
        ...     dist.all_reduce(total)
        ...     return total.item()
        >>> run_cluster(rank_sum, Topology(4, gpus_per_node=2))
        [6, 6, 6, 6]
    """
    cluster = _Cluster(topology)

    def play(rank: int) -> T:
        torch.set_num_threads(1)
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=topology.num_ranks)
            try:
                return fn(*args)
            finally:
                dist.destroy_process_group()

    with threads_are_ranks() as store:
        return cluster.run(play)


def share(make: Callable[[], T]) -> T:
    """Returns on every rank what ``make`` returns on one: the same object, made once.

    Args:
        make: called by one rank of a :func:`run_cluster`, when all ranks are here. It must issue no collective.

    Raises:
        ClusterError: see :func:`run_cluster`; or the caller is none of its ranks.

    Example:
        >>> run_cluster(lambda: share(object), Topology(2, gpus_per_node=2)).count(None)
        0
    """
    cluster = getattr(_current, "cluster", None)
    if cluster is None:
        raise ClusterError("share is for the ranks of run_cluster, which meet there")
    rank = _current.rank

    def give(calls: Sequence[_Call]) -> None:
        made = make()
        for call in calls:
            call.result = made

    call = _Call("share")
    cluster.meet("share", tuple(range(cluster.topology.num_ranks)), rank, call, give)
    made: T = call.result
    return made


class _Current(threading.local):
    rank: int
    cluster: _Cluster


_current = _Current()


class _StoppedError(BaseException):
    """Ends a rank when another one has failed."""


@dataclass
class _Call:
    """What a rank brings to where the ranks of a group meet.

    Args:
        name: of the collective.
        detail: what else of it must be equal on all ranks.
        data: tensors.
        result: what the rank takes away.
    """

    name: str
    detail: str = ""
    data: Any = None
    result: Any = None

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".rstrip()


@dataclass
class _Meeting:
    """A collective that not every rank of its group has reached.

    Args:
        ranks: of the group.
        calls: by rank.
    """

    ranks: tuple[int, ...]
    calls: dict[int, _Call] = field(default_factory=dict)


class _Cluster:
    """Lets one rank run at a time, and brings those of a group together.

    Args:
        topology: of the world.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._turns = [threading.Semaphore(0) for _ in range(topology.num_ranks)]
        self._ready = deque(range(topology.num_ranks))
        self._meetings: dict[object, _Meeting] = {}
        self._failure: ClusterError | None = None

    def run(self, play: Callable[[int], T]) -> list[T]:
        """Plays all ranks; returns or raises when none runs any more."""
        results: dict[int, T] = {}

        def thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                self._go_on()
                _current.rank, _current.cluster = rank, self
                results[rank] = play(rank)
            except _StoppedError:
                pass
            except BaseException:
                self._fail(ClusterError(f"rank {rank} failed:\n{traceback.format_exc()}"))
            self._hand_over()

        def interrupt() -> None:  # every rank ends at its next collective
            self._failure = ClusterError("the cluster was interrupted")

        random = torch.get_rng_state()
        threads = [
            threading.Thread(target=thread, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.topology.num_ranks)
        ]
        try:
            with _interrupts_wait(interrupt):
                for each in threads:
                    each.start()
                self._hand_over()
                for each in threads:
                    each.join()
        finally:
            torch.set_rng_state(random)
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.topology.num_ranks)]

    def meet(
        self,
        key: object,
        ranks: tuple[int, ...],
        rank: int,
        call: _Call,
        perform: Callable[[Sequence[_Call]], None],
    ) -> None:
        """Waits until every rank of a group has called; the last to come performs for all.

        Args:
            key: of the group.
            ranks: world ranks of the group.
            rank: who calls.
            call: its call.
            perform: given the calls in the order of ``ranks``.
        """
        self._go_on()
        meeting = self._meetings.setdefault(key, _Meeting(ranks))
        meeting.calls[rank] = call
        if len(meeting.calls) < len(ranks):
            random = torch.get_rng_state()
            self._hand_over()
            self._turns[rank].acquire()
            self._go_on()
            torch.set_rng_state(random)
            return
        calls = dict(meeting.calls)
        del meeting.calls[rank]  # it need not be woken if this fails
        if len({str(each) for each in calls.values()}) > 1:
            self._fail(ClusterError(f"ranks issue different collectives: {_others(meeting.ranks, calls)}"))
            raise _StoppedError
        perform([calls[each] for each in ranks])
        del self._meetings[key]
        self._ready.extend(each for each in ranks if each != rank)

    def _hand_over(self) -> None:
        """Lets the next rank run, if there is one."""
        if not self._ready and self._meetings:
            self._fail(ClusterError(f"ranks wait for each other in vain: {self._waiting()}"))
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _go_on(self) -> None:
        if self._failure is not None:
            raise _StoppedError

    def _fail(self, failure: ClusterError) -> None:
        """Wakes every rank that waits, to end."""
        self._failure = self._failure or failure
        self._ready.extend(rank for meeting in self._meetings.values() for rank in meeting.calls)
        self._meetings.clear()

    def _waiting(self) -> str:
        waiting: dict[int, str] = {}
        for meeting in self._meetings.values():
            for rank, call in meeting.calls.items():
                waiting[rank] = f"in {call} of the group of {_ranks(meeting.ranks)}"
        for rank in range(self.topology.num_ranks):
            waiting.setdefault(rank, "no longer: it has ended")
        return _by_text(waiting)


@contextmanager
def _interrupts_wait(note: Callable[[], None]) -> Iterator[None]:
    """Calls ``note`` at the first interrupt, and lets it happen when the block has ended; a second one does not wait.

    Raised at once, it could leave threads behind that run, or wait for ever.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []

    def keep(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        frames.append(frame)
        note()

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if frames:
        handler(signal.SIGINT, frames[0])


def _others(ranks: Sequence[int], calls: Mapping[int, _Call]) -> str:
    """Says who issues what in a group, those that issue another collective than most first."""
    texts = _by_text({rank: str(call) for rank, call in calls.items()})
    return f"{texts} (group of {_ranks(ranks)})"


def _by_text(texts: Mapping[int, str]) -> str:
    counts = Counter(texts.values())
    ranks = {text: tuple(rank for rank, its in sorted(texts.items()) if its == text) for text in counts}
    return "; ".join(
        f"{_ranks(ranks[text])}: {text}" for text in sorted(counts, key=lambda t: (counts[t], ranks[t]))
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, …, {ranks[-1]} ({len(ranks)})"
    return f"ranks {', '.join(map(str, ranks))}"


class _ThreadProcessGroup(RingProcessGroup):
    """A process group of threads.

    Args:
        cluster: in which its ranks run.
        name: tells it from other groups of the same ranks.
        rank: rank in the group.
        ranks: world ranks of the group, in group order.
        topology: the group's own; None for the world's, restricted to the group.
    """

    def __init__(
        self, cluster: _Cluster, name: str, rank: int, ranks: Sequence[int], topology: Topology | None
    ) -> None:
        super().__init__(rank, len(ranks))
        serve_collectives_without_tensors(self)
        self._cluster = cluster
        self._ranks = tuple(ranks)
        self._key = (name, self._ranks)
        self.topology = topology or cluster.topology.restrict(self._ranks)

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """See :class:`graphpasses._torch.process_group.PythonProcessGroup`."""

        def deliver(calls: Sequence[_Call]) -> None:
            for rank, call in enumerate(calls):
                for source, target in call.data[1].items():
                    target.detach().copy_(calls[source].data[0][rank].detach().reshape(target.shape))

        self._meet(_Call(collective, data=(sent, received)), deliver)

    def _reduce_scatter(self, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        return self._reduce_all(
            "reduce_scatter",
            flat,
            op,
            lambda flats: simulate_reduce_scatter(flats, self.topology, op, factor=factor),
        )

    def _all_reduce(self, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        def all_reduce(flats: Sequence[Tensor]) -> list[Tensor]:
            return [simulate_all_reduce(flats, self.topology, op, factor=factor)] * len(flats)

        return self._reduce_all("all_reduce", flat, op, all_reduce)

    def _reduce_to(self, root: int, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        def reduce(flats: Sequence[Tensor]) -> list[Tensor]:
            parts = reduction_parts(self.topology, "reduce", len(flat), flat.element_size(), root)
            return [reduce_parts(flats, parts, self.topology, op, factor=factor)] * len(flats)

        return self._reduce_all(f"reduce to rank {self._ranks[root]}", flat, op, reduce)

    def _reduce_all(
        self,
        name: str,
        flat: Tensor,
        op: ReduceOpName,
        reduce: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> Tensor:
        def perform(calls: Sequence[_Call]) -> None:
            for call, result in zip(calls, reduce([call.data for call in calls]), strict=True):
                call.result = result

        call = _Call(name, f"({op}) of {len(flat)} {str(flat.dtype).removeprefix('torch.')}", flat)
        self._meet(call, perform)
        result: Tensor = call.result
        return result

    def _meet(self, call: _Call, perform: Callable[[Sequence[_Call]], None]) -> None:
        self._cluster.meet(self._key, self._ranks, self._ranks[self.rank()], call, perform)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> dist.Work:
        """Refused."""
        raise ClusterError(_ONLY_COLLECTIVES)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> dist.Work:
        """Refused."""
        raise ClusterError(_ONLY_COLLECTIVES)


def _create(options: Any, pg_options: Any) -> _ThreadProcessGroup:
    cluster = getattr(_current, "cluster", None)
    if cluster is None:
        raise ClusterError(f"the backend {_BACKEND} is for ranks of run_cluster; use nccl_sim for processes")
    ranks = options.global_ranks_in_group or range(options.group_size)
    topology = pg_options if isinstance(pg_options, Topology) else None
    return _ThreadProcessGroup(cluster, options.group_id, options.group_rank, ranks, topology)


dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])
