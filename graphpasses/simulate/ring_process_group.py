"""Process groups whose reductions give the bits that NCCL's rings would give."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.process_group import PythonProcessGroup, finished_work
from graphpasses.errors import UnsupportedError
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.nccl import Collective


class RingProcessGroup(PythonProcessGroup):
    """The interface of reductions, coalesced ones one by one; a subclass knows how the ranks exchange data."""

    def _reduce(
        self, collective: Collective, flat: Tensor, op: ReduceOpName, factor: float, root: int
    ) -> Tensor:
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
        """Reduces several inputs, one after the other."""
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


def _parse_op(opts: Any) -> tuple[ReduceOpName, float]:
    op: Any = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    for name in get_args(ReduceOpName):
        if op == getattr(dist.ReduceOp, name.upper()):
            return name, float(op.factor) if name == "premul_sum" else 1.0
    raise UnsupportedError(f"NCCL has no {op.op}; it has {', '.join(get_args(ReduceOpName))}")
