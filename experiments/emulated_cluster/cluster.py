"""One process that is a rank of a cluster: what collectives bring is there at once, but may be read later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from experiments.emulated_cluster.clock import Hidden, WallClock
from experiments.emulated_cluster.streams import Moment, Streams
from graphpasses._torch.process_group import serve_collectives_without_tensors
from graphpasses.graph.traffic import Event, Traffic
from graphpasses.scale import Transfer
from graphpasses.simulate.process_group import RingProcessGroup

__all__ = ["Cluster", "emulated_cluster"]

BACKEND = "emulated"


class Cluster:
    """Where collectives wait.

    Args:
        wire: seconds of a collective that has the wire of its process group for itself.
        clock: by which it counts.
    """

    def __init__(self, wire: Callable[[Transfer], float], clock: WallClock | None = None) -> None:
        self.wire = wire
        self.clock = clock or WallClock()
        self.streams = Streams(self.clock)
        self._launches = Hidden[list[tuple[Transfer, float]]]([])  # each with what the clock had computed then

    def launch(self, transfer: Transfer) -> int:
        """Notes a collective, and returns its number."""
        launches = self._launches.value
        launches.append((transfer, self.clock.computed))
        return len(launches) - 1

    def traffic_of(self, run: Callable[[], object]) -> Traffic:
        """Runs something, and returns what it sends; ``num_bytes`` of what it computes in between are nanoseconds."""
        first, now = len(self._launches.value), self.clock.computed
        run()
        launches, end = self._launches.value[first:], self.clock.computed
        transfers, times = zip(*launches, strict=True)
        happened = [(at, Event("launch", index)) for index, at in enumerate(times)]
        waits = {number - first: at for number, at in self.streams.waits.items() if number >= first}
        happened += [(at, Event("wait", index)) for index, at in waits.items()]
        events: list[Event] = []
        for at, event in [*sorted(happened, key=lambda each: each[0]), (end, None)]:
            events.append(Event("compute", num_bytes=round(1e9 * (at - now))))
            events += [event] if event else []
            now = at
        return Traffic(transfers[0].num_ranks, transfers, tuple(events))


_clusters: list[Cluster] = []


@contextmanager
def emulated_cluster(num_ranks: int, cluster: Cluster, rank: int = 0) -> Iterator[None]:
    """Initialises ``torch.distributed`` as one of ``num_ranks`` ranks, each of which has what this one has.

    A collective starts when it is launched and the one before it on its process group has ended; it ends as many
    seconds later as the cluster's wire says. Waiting for it sleeps until then. What arrives is computed at once: an
    all-gather brings this rank's shard again and again, a reduction the sum of equal contributions.

    Example:
        >>> with emulated_cluster(8, Cluster(lambda transfer: 0.01)):
        ...     work = dist.all_reduce(torch.ones(4), async_op=True)
        ...     start = time.perf_counter()
        ...     done = work.wait()
        ...     time.perf_counter() - start > 0.005
        True
    """
    _clusters.append(cluster)
    with cluster.streams.in_torch():
        dist.init_process_group(BACKEND, rank=rank, world_size=num_ranks, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            _clusters.pop()


class _Work(dist.Work):
    def __init__(self, cluster: Cluster, done: Moment, sent: object) -> None:
        super().__init__()
        self._cluster, self._done = cluster, done
        self._sent = sent  # it lives until it has been waited for

    def wait(self, timeout: object = None) -> bool:
        self._cluster.streams.current.wait_until(self._done)
        self._sent = None
        return True


class EmulatedProcessGroup(RingProcessGroup):
    """A process group of one process, whose collectives take time."""

    def __init__(self, cluster: Cluster, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        serve_collectives_without_tensors(self)
        self._cluster, self._free = cluster, 0.0
        steps = {b - a for a, b in itertools.pairwise(ranks)}
        self._stride = steps.pop() if len(steps) == 1 else 0

    def exchange(self, collective: str, sent: Any, received: Any) -> None:
        """See :class:`graphpasses._torch.process_group.PythonProcessGroup`."""
        for rank, target in received.items():
            if rank in sent:
                target.detach().copy_(sent[rank].detach().reshape(target.shape))

    def _reduce(self, collective: Any, flat: Tensor, op: Any, factor: float, root: int) -> Tensor:
        size = self.size()
        if op in ("sum", "premul_sum"):
            flat = flat * (size * factor)
        elif op == "product":
            flat = flat**size
        return flat.view(size, -1)[self.rank()] if collective == "reduce_scatter" else flat

    def _timed(self, collective: str, num_bytes: int, sent: object) -> dist.Work:
        transfer = Transfer(collective, num_bytes, self.size(), self._stride)
        number = self._cluster.launch(transfer)
        self._free = max(self._free, self._cluster.streams.current.moment.end) + self._cluster.wire(transfer)
        return _Work(self._cluster, Moment(self._free, frozenset({number})), sent)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gathers this rank's shard as each rank's."""
        output.detach().view(self.size(), -1).copy_(input.detach().clone().view(1, -1))
        return self._timed("all_gather", output.nbytes, input)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gathers several inputs, one after the other."""
        return [self.all_gather_single(*each) for each in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduces equal contributions."""
        super().reduce_scatter_single(output, input, opts)
        return self._timed("reduce_scatter", input.nbytes, input)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduces several inputs, one after the other."""
        return [self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)][-1]

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduces equal contributions."""
        super().allreduce(tensors, opts)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._timed("all_reduce", sum(each.nbytes for each in tensors), tensors)

    allreduce_coalesced = allreduce

    def all_to_all_single(self, output: Tensor, input: Tensor, *splits: Any) -> dist.Work:
        """Exchanges with ranks that send what this one sends."""
        super().all_to_all_single(output, input, *splits)
        return self._timed("all_to_all", max(output.nbytes, input.nbytes), input)


def _create(options: Any, pg_options: Any) -> EmulatedProcessGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return EmulatedProcessGroup(_clusters[-1], options.group_rank, ranks)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
