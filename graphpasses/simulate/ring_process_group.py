"""Process groups whose reductions give the bits that NCCL's rings would give."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.process_group import PythonProcessGroup, finished_work
from graphpasses.errors import UnsupportedError
from graphpasses.simulate.arithmetic import ReduceOpName


class RingProcessGroup(PythonProcessGroup):
    """The interface of reductions; a subclass knows how the ranks exchange data.

    The collectives of a coalesced call are simulated one by one.
    """

    def _reduce_scatter(self, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        """Returns this rank's shard of the sum of all ranks' ``flat``."""
        raise NotImplementedError

    def _all_reduce(self, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        """Returns the sum of all ranks' ``flat``."""
        raise NotImplementedError

    def _reduce_to(self, root: int, flat: Tensor, op: ReduceOpName, factor: float) -> Tensor:
        """Returns the sum of all ranks' ``flat``; ranks other than ``root`` may return anything."""
        raise NotImplementedError

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduces ``input``, ``size()`` shards of ``output``'s size, into every rank's ``output``."""
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter needs an input of {self.size()} times the output's {output.numel()} "
                f"{output.dtype} elements, got {input.numel()} {input.dtype} elements"
            )
        _assign(output, self._reduce_scatter(input.detach().reshape(-1), *_parse_op(opts)))
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
                total = self._reduce_to(root, shard.detach().reshape(-1), *_parse_op(opts))
                if root == self.rank():
                    _assign(output, total)
        return finished_work(outputs)

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor] | Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduces tensors in place, one after the other."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            _assign(tensor, self._all_reduce(tensor.detach().reshape(-1), *_parse_op(opts)))
        return finished_work(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduces tensors in place on the root; other ranks' tensors stay as they are."""
        for tensor in tensors:
            total = self._reduce_to(opts.rootRank, tensor.detach().reshape(-1), *_parse_op(opts))
            if opts.rootRank == self.rank():
                _assign(tensor, total)
        return finished_work(tensors)


def _parse_op(opts: Any) -> tuple[ReduceOpName, float]:
    op: Any = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    for name in get_args(ReduceOpName):
        if op == getattr(dist.ReduceOp, name.upper()):
            return name, float(op.factor) if name == "premul_sum" else 1.0
    raise UnsupportedError(f"NCCL has no {op.op}; it has {', '.join(get_args(ReduceOpName))}")


def _assign(target: Tensor, flat: Tensor) -> None:
    target.detach().copy_(flat.view(target.shape))
