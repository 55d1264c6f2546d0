"""Private torch API behind Python process groups, such as gloo's here, ranks that are threads, and waiting."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import Store, Work

c10d: Any = _c10d


class PythonProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are exchanges of tensors, finished when they return; subclasses reduce."""

    def __init__(self, rank: int, size: int) -> None:
        # The only constructor that Python subclasses can use is missing from torch's stub.
        super().__init__(rank, size)  # type: ignore[call-arg]

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each rank of ``sent``, and fills that of each rank of ``received`` with one like it."""
        raise NotImplementedError

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:  # type: ignore
        """Gathers each input into one list of tensors, one per rank."""
        for parts, input in zip(outputs, inputs, strict=True):
            self.exchange("allgather", self._to_all(input), dict(enumerate(parts)))
        return finished_work(outputs)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers several inputs into one list of tensors per rank."""
        for parts, input in zip(zip(*output_lists, strict=True), input_list, strict=True):
            self.exchange("allgather_coalesced", self._to_all(input), dict(enumerate(parts)))
        return finished_work(output_lists)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gathers ``input`` into ``output``, one rank after the other."""
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather needs an output of {self.size()} times the input's {input.numel()} "
                f"{input.dtype} elements, got {output.numel()} {output.dtype} elements"
            )
        whole = output.detach().contiguous()
        self.exchange("all_gather_single", self._to_all(input.detach().reshape(-1)), split_evenly(whole, self.size()))
        if not output.is_contiguous():
            output.detach().copy_(whole)
        return finished_work([output])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers several inputs, one after the other."""
        for output, input in zip(output_lists, input_list, strict=True):
            self.all_gather_single(output, input)
        return finished_work(output_lists)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Sends rank r the r-th part of ``input`` along dimension 0; equal parts where no sizes are given."""
        sent, received = (input.detach(), input_split_sizes), (output.detach(), output_split_sizes)
        self.exchange("all_to_all_single", self._split(*sent), self._split(*received))
        return finished_work([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Sends rank r the r-th input."""
        self.exchange("alltoall", dict(enumerate(inputs)), dict(enumerate(outputs)))
        return finished_work(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Sends the root's tensors to all."""
        for tensor in tensors:
            if opts.rootRank == self.rank():
                self.exchange("broadcast", self._to_all(tensor), {})
            else:
                self.exchange("broadcast", {}, {opts.rootRank: tensor})
        return finished_work(tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Sends every rank's input to the root."""
        parts = dict(enumerate(outputs[0])) if opts.rootRank == self.rank() else {}
        self.exchange("gather", {opts.rootRank: inputs[0]}, parts)
        return finished_work(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:  # type: ignore[override]
        """Sends rank r the root's r-th input."""
        parts = dict(enumerate(inputs[0])) if opts.rootRank == self.rank() else {}
        self.exchange("scatter", parts, {opts.rootRank: outputs[0]})
        return finished_work(outputs)

    def barrier(self, opts: Any = None) -> Work:
        """Waits until every rank is here."""
        received = {rank: torch.zeros(1, device="cpu") for rank in range(self.size())}
        self.exchange("barrier", self._to_all(torch.zeros(1, device="cpu")), received)
        return finished_work([])

    def _to_all(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(range(self.size()), tensor)

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
        if not sizes:
            length, rest = divmod(tensor.size(0), self.size())
            if rest:
                raise ValueError(f"all_to_all cannot split {tensor.size(0)} rows evenly over {self.size()} ranks")
            sizes = [length] * self.size()
        return dict(enumerate(torch.split(tensor, list(sizes))))


def finished_work(outputs: list[Any]) -> Work:
    """Returns work that was finished before it was returned."""
    future: torch.futures.Future[list[Any]] = torch.futures.Future()
    future.set_result(outputs)
    work: Work = c10d._create_work_from_future(future)
    return work


def split_evenly(tensor: Tensor, num_parts: int) -> dict[int, Tensor]:
    """Returns the flat, equal parts of a contiguous tensor, by number."""
    return dict(enumerate(tensor.view(num_parts, tensor.numel() // num_parts).unbind()))


_TAG = 0x67706173
"""Tag of our messages: a user's ``dist.send`` of the same tag would be mixed up with them."""


class GlooProcessGroup(PythonProcessGroup):
    """A Python process group whose exchanges are sends and receives over gloo, with a store of its own.

    gloo's own collectives free Python tensors in worker threads: one that waits for the GIL while the interpreter
    exits aborts the process (pytorch/pytorch#190489), and deadlocks while it holds gloo's queue.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self.gloo):
            # A ProcessGroup finds a device's backend only through this; there is no public way. Tested: 2.13.
            group._register_backend(torch.device("cpu"), kind, backend)
            # Collectives without a tensor go to the default backend, unset until then. Tested: 2.13.
            group._set_default_backend(kind)

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """See :class:`PythonProcessGroup`."""
        works, copies = [], []
        for rank, tensor in received.items():
            target = tensor.detach()
            if rank == self.rank():
                target.copy_(sent[rank].detach().reshape(target.shape))
            elif target.numel() > 0:
                whole = target.contiguous()
                works.append(self.gloo.recv([_as_bytes(whole)], rank, _TAG))
                if not target.is_contiguous():
                    copies.append((target, whole))
        for rank, tensor in sent.items():
            if rank != self.rank() and tensor.numel() > 0:
                works.append(self.gloo.send([_as_bytes(tensor.detach().contiguous())], rank, _TAG))
        for work in works:
            work.wait()
        for target, whole in copies:
            target.copy_(whole)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> Work:
        """gloo's send; a Python override, since torch's base class keeps the GIL."""
        return self.gloo.send(tensors, dst_rank, tag)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> Work:
        """gloo's receive; a Python override, since torch's base class keeps the GIL."""
        return self.gloo.recv(tensors, src_rank, tag)


def _as_bytes(tensor: Tensor) -> Tensor:
    # gloo does not know every dtype.
    return tensor.view(-1).view(torch.uint8)


_numbers = itertools.count()


class _Number(threading.local):
    """A number for each thread that no other thread has ever had."""

    def __init__(self) -> None:
        self.value = next(_numbers)


_number = _Number()


@contextmanager
def threads_are_ranks() -> Iterator[Any]:
    """Gives each thread its own default group, groups by name and meshes in a block; yields a store for all."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    with (
        patch.object(distributed_c10d, "_world", ThreadLocalWorld()),
        # For this backend alone a mesh is another than that of the same ranks in another thread. Not by the thread's
        # own number, which a later thread, of another rank, may get while DTensor's caches still have the mesh.
        patch.object(device_mesh, "get_backend", lambda group=None: "threaded"),
        patch.object(device_mesh, "threading", SimpleNamespace(get_ident=lambda: _number.value)),
    ):
        c10d._set_thread_isolation_mode(True)
        try:
            yield c10d.HashStore()
        finally:
            c10d._set_thread_isolation_mode(False)


def finish_when_waited(tensor: Tensor, finish: Callable[[], object]) -> Tensor:
    """Lets ``wait_tensor`` of a tensor call a function, which fills it, first; returns the tensor."""
    c10d._register_work(tensor, _Finish(finish))
    return tensor


class _Finish(dist.Work):
    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: object = None) -> bool:
        self._finish()
        return True


def serve_collectives_without_tensors(group: dist.ProcessGroup) -> None:
    """Gives a group on CPU that overrides all collectives what torch asks for: a backend, which does nothing else."""
    options = c10d.FakeProcessGroup.Options()
    backend = c10d.FakeProcessGroup._create_internal(group.rank(), group.size(), options)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
