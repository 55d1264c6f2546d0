"""The ``nccl_sim`` backend: gloo moves the data, and reductions add in the order of NCCL's rings.

    import graphpasses.simulate
    dist.init_process_group("nccl_sim")

CPU tensors only. Collectives finish before they return, also with ``async_op=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.process_group import (
    GlooProcessGroup,
    PythonProcessGroup,
    finished_work,
    serve_collectives_without_tensors,
    split_evenly,
)
from graphpasses.errors import ClusterError, TopologyError, UnsupportedError
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.collectives import reduce_parts, simulate_reduce_scatter
from graphpasses.simulate.nccl import Collective, reduction_parts
from graphpasses.simulate.rings import Topology, default_topology
from graphpasses.simulate.scheduler import Call, current

_configured: Topology | None = None


def configure(topology: Topology | None) -> None:
    """Sets the cluster that the ``nccl_sim`` backend of this process simulates, from its next reduction on.

    Every rank must configure the same. Groups that were made with ``pg_options=Topology(...)`` keep theirs.

    Args:
        topology: the topology of the world; None for :func:`default_topology`. A group of some of the ranks
            uses ``topology.restrict(ranks)``.

    Example:
        >>> configure(Topology(16, gpus_per_node=8, mode="cross_nic"))
        >>> configure(None)
    """
    global _configured
    _configured = topology


class RingProcessGroup(PythonProcessGroup):
    """The interface of reductions, coalesced ones one by one; a subclass knows how the ranks exchange data."""

    def _reduce(self, collective: Collective, flat: Tensor, op: ReduceOpName, factor: float, root: int) -> Tensor:
        """Returns what this rank gets of the sum of all ranks' ``flat``; other ranks than a root may get anything."""
        raise NotImplementedError

    def _reduce_into(
        self, output: Tensor, collective: Collective, tensor: Tensor, opts: Any, root: int | None = None
    ) -> None:
        """Reduces ``tensor`` and writes the result to ``output``, on the root alone if there is one."""
        flat = tensor.detach().reshape(-1)
        result = self._reduce(collective, flat, *_parse_op(opts), root=root or 0)
        if root in (None, self.rank()):
            output.detach().copy_(result.view(output.shape))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduces ``input``, ``size()`` shards of ``output``'s size, into every rank's ``output``."""
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter needs an input of {self.size()} times the output's {output.numel()} "
                f"{output.dtype} elements, got {input.numel()} {input.dtype} elements"
            )
        self._reduce_into(output, "reduce_scatter", input, opts)
        return finished_work([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return finished_work(outputs)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduces lists of shards; uneven ones as one reduction per shard, as torch does on NCCL."""
        for output, shards in zip(outputs, inputs, strict=True):
            if len({shard.numel() for shard in shards}) == 1:
                flat = torch.cat([shard.detach().reshape(-1) for shard in shards])
                self.reduce_scatter_single(output, flat, opts)
                continue
            for root, shard in enumerate(shards):
                self._reduce_into(output, "reduce", shard, opts, root)
        return finished_work(outputs)

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor] | Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduces tensors in place, one after the other."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            self._reduce_into(tensor, "all_reduce", tensor, opts)
        return finished_work(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduces tensors in place on the root; other ranks' tensors stay as they are."""
        for tensor in tensors:
            self._reduce_into(tensor, "reduce", tensor, opts, opts.rootRank)
        return finished_work(tensors)


class NCCLSimProcessGroup(RingProcessGroup, GlooProcessGroup):
    """A process group whose reductions give the bits that NCCL's rings would give.

    A reduce-scatter exchanges raw contributions, one shard per rank, and adds them locally. An all-reduce does so for
    one stretch of the buffer per rank and gathers the results. Made by torch, of ``init_process_group`` or
    ``new_group``; without a topology of its own as ``pg_options`` it has the world's, restricted to the group.
    """

    def __init__(self, options: Any, pg_options: Any) -> None:
        self._topology = pg_options if isinstance(pg_options, Topology) else None
        if self._topology is not None:
            _check_size(self._topology, options.group_size)
        super().__init__(options.store, options.group_rank, options.group_size, options.timeout)
        self._global_ranks = _global_ranks(options)

    @property
    def topology(self) -> Topology:
        """The topology of this group's ranks."""
        if self._topology is not None:
            return self._topology
        world = dist.group.WORLD
        if isinstance(world, NCCLSimProcessGroup) and world is not self:
            return world.topology.restrict(self._global_ranks)
        num_ranks = self.size() if world is None else world.size()
        whole = _configured or default_topology(num_ranks)
        _check_size(whole, num_ranks)
        return whole.restrict(self._global_ranks)

    def _reduce(self, collective: Collective, flat: Tensor, op: ReduceOpName, factor: float, root: int) -> Tensor:
        size, topology = self.size(), self.topology
        count, offset = flat.numel(), 0
        if collective == "reduce":
            gathered = flat.new_empty(size * count)
            self.all_gather_single(gathered, flat)
            contributions = split_evenly(gathered, size)
        elif collective == "reduce_scatter":
            count, root = count // size, self.rank()
            contributions = self._shards(flat)
        else:
            stretch = -(-count // size)
            padded = flat.new_zeros(stretch * size)
            padded[:count] = flat
            offset = stretch * self.rank()
            contributions = self._shards(padded)
        parts = reduction_parts(topology, collective, count, flat.element_size(), root, op)
        result = reduce_parts([*contributions.values()], parts, topology, op, factor=factor, offset=offset)
        if collective == "all_reduce":
            self.all_gather_single(padded, result)
            result = padded[:count]
        return result

    def _shards(self, flat: Tensor) -> dict[int, Tensor]:
        """Returns every rank's contribution to this rank's stretch of the buffer, unreduced."""
        shards = split_evenly(torch.empty_like(flat), self.size())
        self.exchange("reduction", split_evenly(flat, self.size()), shards)
        return shards


def _parse_op(opts: Any) -> tuple[ReduceOpName, float]:
    op: Any = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    for name in get_args(ReduceOpName):
        if op == getattr(dist.ReduceOp, name.upper()):
            return name, float(op.factor) if name == "premul_sum" else 1.0
    raise UnsupportedError(f"NCCL has no {op.op}; it has {', '.join(get_args(ReduceOpName))}")


def _check_size(topology: Topology, num_ranks: int) -> None:
    if topology.num_ranks != num_ranks:
        raise TopologyError(f"the topology has {topology.num_ranks} ranks, but the process group has {num_ranks}")


def _global_ranks(options: Any) -> tuple[int, ...]:
    """Returns the world ranks of a group, in group order; torch passes none for the world."""
    return tuple(options.global_ranks_in_group or range(options.group_size))


dist.Backend.register_backend("nccl_sim", NCCLSimProcessGroup, extended_api=True, devices=["cpu"])


# ---- ranks that are threads ----------------------------------------------------------------------------------

BACKEND = "nccl_threads"


class ThreadProcessGroup(RingProcessGroup):
    """A process group of threads."""

    def __init__(self, options: Any, pg_options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        if current.scheduler is None:
            raise ClusterError(f"the backend {BACKEND} is for ranks of run_cluster; use nccl_sim for processes")
        serve_collectives_without_tensors(self)
        self._scheduler, self._ranks = current.scheduler, _global_ranks(options)
        self._key = (options.group_id, self._ranks)
        own = pg_options if isinstance(pg_options, Topology) else None
        self.topology = own or self._scheduler.topology.restrict(self._ranks)

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        def deliver(calls: Sequence[Call]) -> None:
            for rank, call in enumerate(calls):
                for source, target in call.data[1].items():
                    target.detach().copy_(calls[source].data[0][rank].detach().reshape(target.shape))

        self._meet(Call(collective, data=(sent, received)), deliver)

    def _reduce(self, collective: Collective, flat: Tensor, op: ReduceOpName, factor: float, root: int) -> Tensor:
        def perform(calls: Sequence[Call]) -> None:
            flats = [call.data for call in calls]
            if collective == "reduce_scatter":
                results = simulate_reduce_scatter(flats, self.topology, op, factor=factor)
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

    def send(self, *_: Any) -> dist.Work:
        raise ClusterError("ranks of a simulated cluster meet in collectives only; send and recv are not played")

    recv = send  # type: ignore[assignment]


dist.Backend.register_backend(BACKEND, ThreadProcessGroup, extended_api=True, devices=["cpu"])
