"""Private torch API behind the Python process groups of ``graphpasses.simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work


class PythonProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are exchanges of tensors, for subclasses to add reductions.

    Every collective finishes before it returns, also with ``async_op=True``.
    """

    def __init__(self, rank: int, size: int) -> None:
        # The only constructor that Python subclasses can use is missing from torch's stub.
        super().__init__(rank, size)  # type: ignore[call-arg]

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each rank of ``sent`` and fills the tensor of each rank of ``received``.

        A received tensor has the sender's size and dtype.
        """
        raise NotImplementedError

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers each input into one list of tensors, one per rank."""
        for parts, input in zip(outputs, inputs, strict=True):
            self.exchange("allgather", self._to_all(input), dict(enumerate(parts)))
        return FinishedWork(outputs)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers several inputs into one list of tensors per rank."""
        for parts, input in zip(zip(*output_lists, strict=True), input_list, strict=True):
            self.exchange("allgather_coalesced", self._to_all(input), dict(enumerate(parts)))
        return FinishedWork(output_lists)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gathers ``input`` into ``output``, one rank after the other."""
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather needs an output of {self.size()} times the input's {input.numel()} "
                f"{input.dtype} elements, got {output.numel()} {output.dtype} elements"
            )
        whole = output.detach().contiguous()
        self.exchange(
            "all_gather_single", self._to_all(input.detach().reshape(-1)), split_evenly(whole, self.size())
        )
        if not output.is_contiguous():
            output.detach().copy_(whole)
        return FinishedWork([output])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers several inputs, one after the other."""
        for output, input in zip(output_lists, input_list, strict=True):
            self.all_gather_single(output, input)
        return FinishedWork(output_lists)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Sends rank r the r-th part of ``input`` along dimension 0; equal parts where no sizes are given."""
        self.exchange(
            "all_to_all_single",
            self._split(input.detach(), input_split_sizes),
            self._split(output.detach(), output_split_sizes),
        )
        return FinishedWork([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Sends rank r the r-th input."""
        self.exchange("alltoall", dict(enumerate(inputs)), dict(enumerate(outputs)))
        return FinishedWork(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Sends the root's tensors to all."""
        for tensor in tensors:
            if opts.rootRank == self.rank():
                self.exchange("broadcast", self._to_all(tensor), {})
            else:
                self.exchange("broadcast", {}, {opts.rootRank: tensor})
        return FinishedWork(tensors)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> Work:
        """Sends every rank's input to the root."""
        parts = dict(enumerate(outputs[0])) if opts.rootRank == self.rank() else {}
        self.exchange("gather", {opts.rootRank: inputs[0]}, parts)
        return FinishedWork(outputs)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> Work:
        """Sends rank r the root's r-th input."""
        parts = dict(enumerate(inputs[0])) if opts.rootRank == self.rank() else {}
        self.exchange("scatter", parts, {opts.rootRank: outputs[0]})
        return FinishedWork(outputs)

    def barrier(self, opts: Any = None) -> Work:
        """Waits until every rank is here."""
        self.exchange(
            "barrier", self._to_all(torch.zeros(1)), {rank: torch.zeros(1) for rank in range(self.size())}
        )
        return FinishedWork([])

    def _to_all(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(range(self.size()), tensor)

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
        if not sizes:
            length, rest = divmod(tensor.size(0), self.size())
            if rest:
                raise ValueError(
                    f"all_to_all cannot split {tensor.size(0)} rows evenly over {self.size()} ranks"
                )
            sizes = [length] * self.size()
        return dict(enumerate(torch.split(tensor, list(sizes))))


class FinishedWork(Work):
    """Work that was finished before it was returned."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Any]]:
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def split_evenly(tensor: Tensor, num_parts: int) -> dict[int, Tensor]:
    """Returns the flat, equal parts of a contiguous tensor, by number."""
    return dict(enumerate(tensor.view(num_parts, tensor.numel() // num_parts).unbind()))
