"""Process groups of ranks that are threads; reductions add in the order of NCCL's rings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.process_group import serve_collectives_without_tensors
from graphpasses.errors import ClusterError
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.collectives import reduce_parts, simulate_all_reduce, simulate_reduce_scatter
from graphpasses.simulate.nccl import Collective, reduction_parts
from graphpasses.simulate.process_group import RingProcessGroup
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.scheduler import Call, RankScheduler, current

BACKEND = "nccl_threads"
_ONLY_COLLECTIVES = "ranks of a simulated cluster meet in collectives only; send and recv are not played"


class ThreadProcessGroup(RingProcessGroup):
    """A process group of threads."""

    def __init__(
        self, scheduler: RankScheduler, name: str, rank: int, ranks: Sequence[int], topology: Topology
    ) -> None:
        super().__init__(rank, len(ranks))
        serve_collectives_without_tensors(self)
        self._scheduler = scheduler
        self._ranks = tuple(ranks)
        self._key = (name, self._ranks)
        self.topology = topology

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """See :class:`graphpasses._torch.process_group.PythonProcessGroup`."""

        def deliver(calls: Sequence[Call]) -> None:
            for rank, call in enumerate(calls):
                for source, target in call.data[1].items():
                    target.detach().copy_(calls[source].data[0][rank].detach().reshape(target.shape))

        self._meet(Call(collective, data=(sent, received)), deliver)

    def _reduce(
        self, collective: Collective, flat: Tensor, op: ReduceOpName, factor: float, root: int
    ) -> Tensor:
        def perform(calls: Sequence[Call]) -> None:
            flats = [call.data for call in calls]
            if collective == "reduce_scatter":
                results = simulate_reduce_scatter(flats, self.topology, op, factor=factor)
            elif collective == "all_reduce":
                results = [simulate_all_reduce(flats, self.topology, op, factor=factor)] * len(calls)
            else:
                parts = reduction_parts(self.topology, collective, len(flat), flat.element_size(), root, op)
                results = [reduce_parts(flats, parts, self.topology, op, factor=factor)] * len(calls)
            for call, result in zip(calls, results, strict=True):
                call.result = result

        name = f"reduce to rank {self._ranks[root]}" if collective == "reduce" else collective
        call = Call(name, f"({op}) of {len(flat)} {str(flat.dtype).removeprefix('torch.')}", flat)
        self._meet(call, perform)
        result: Tensor = call.result
        return result

    def _meet(self, call: Call, perform: Callable[[Sequence[Call]], None]) -> None:
        self._scheduler.meet(self._key, self._ranks, self._ranks[self.rank()], call, perform)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> dist.Work:
        """Refused."""
        raise ClusterError(_ONLY_COLLECTIVES)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> dist.Work:
        """Refused."""
        raise ClusterError(_ONLY_COLLECTIVES)


def _create(options: Any, pg_options: Any) -> ThreadProcessGroup:
    scheduler = current.scheduler
    if scheduler is None:
        raise ClusterError(f"the backend {BACKEND} is for ranks of run_cluster; use nccl_sim for processes")
    ranks = options.global_ranks_in_group or range(options.group_size)
    topology = pg_options if isinstance(pg_options, Topology) else scheduler.topology.restrict(ranks)
    return ThreadProcessGroup(scheduler, options.group_id, options.group_rank, ranks, topology)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
