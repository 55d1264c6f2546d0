"""Run a function in several real processes of this machine, one per rank."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from graphpasses.errors import GraphPassesError
from graphpasses.roomy_stack import with_roomy_stack

logger = logging.getLogger(__name__)


class RankError(GraphPassesError, RuntimeError):
    """A rank of :func:`run_ranks` failed; the message carries its number and its traceback."""


class _ConnectionError(RankError):
    """A rank was not connected to the others, and no rank has begun."""


@with_roomy_stack
def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    backend: str,
    store: str,
    args: tuple[Any, ...],
    results: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    import graphpasses.simulate  # registers the nccl_sim backend

    del graphpasses
    faulthandler.enable(_stacks(store, rank).open("w"))  # what a rank that a signal ends was doing
    end_with_caller()
    has_begun = False
    try:
        torch.set_num_threads(1)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        dist.barrier()  # none begins before all are connected: until then they can be launched again
        has_begun = True
        result = fn(*args)
        dist.barrier()
        dist.destroy_process_group()
        results.send((None, result))
    except BaseException:
        kind = RankError if has_begun else _ConnectionError
        results.send((kind, traceback.format_exc()))
        raise SystemExit(1) from None


def end_with_caller() -> None:
    """Lets this process end when the one that started it has: alone it would write into files of the next run."""
    caller = multiprocessing.parent_process()

    def wait_and_end(sentinel: int) -> None:
        wait([sentinel])
        signal.raise_signal(signal.SIGKILL)  # during a collective nothing else ends it

    if caller is not None:
        threading.Thread(target=wait_and_end, args=(caller.sentinel,), daemon=True).start()


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    preload: Sequence[str] = ("torch", "torch.distributed.fsdp", "graphpasses.simulate"),
    timeout: float = 600.0,
) -> list[Any]:
    """Calls ``fn(*args)`` in ``num_ranks`` processes with ``torch.distributed`` initialised, one thread each.

    The processes are forked from a server that has imported ``preload`` once, since importing torch is slow. They end
    with the caller, also where it is killed. Where gloo cannot connect them, no rank has begun, and they are launched
    again, twice at most.

    Args:
        fn: a function that can be pickled (defined at the top level of an importable module).
        num_ranks: number of processes.
        args: arguments of ``fn``, picklable.
        backend: backend of the default process group, ``"gloo"`` or ``"nccl_sim"``.
        preload: modules that the fork server imports before it forks the ranks. One server forks those of all
            calls: it imports what the first call says.
        timeout: seconds after which the ranks are ended.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        RankError: a rank raised, died or ran out of time; it names the first such rank.

    Example, in a script::

        if __name__ == "__main__":
            print(run_ranks(torch.distributed.get_rank, 2))  # [0, 1]
    """
    if fn.__module__ == "__main__" and not _is_importable(sys.modules["__main__"]):
        raise RankError(f"other processes cannot import {fn.__qualname__}; define it in a module of its own")
    for _ in range(2):
        try:
            return _launch(fn, num_ranks, args, backend, preload, timeout)
        except _ConnectionError as error:  # gloo's peers hang up, now and then, while they connect
            if "gloo/transport" not in str(error):
                raise
            logger.warning(f"{num_ranks} ranks are launched again, since gloo did not connect them: {error}")
    return _launch(fn, num_ranks, args, backend, preload, timeout)


def _launch(
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    backend: str,
    preload: Sequence[str],
    timeout: float,
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory(prefix="graphpasses-") as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_rank_main, args=(fn, rank, num_ranks, backend, store, args, sender), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            results = _collect([receiver for receiver, _ in pipes], processes, store, timeout)
            for process in processes:
                process.join(timeout=5.0)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _is_importable(main: ModuleType) -> bool:
    """Whether a new process can run the main module again: a script can, ``-m package`` and a prompt cannot."""
    if main.__spec__ is not None:
        return not main.__spec__.name.endswith("__main__")
    return getattr(main, "__file__", None) is not None


def _stacks(store: str, rank: int) -> Path:
    return Path(f"{store}.stacks.{rank}")


def _how_it_ended(process: BaseProcess, stacks: Path) -> str:
    process.join(timeout=5.0)
    code = process.exitcode
    name = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    blocks = stacks.read_text().split("\n\n") if stacks.exists() else []
    text = "\n\n".join(block for block in blocks if "<no Python frame>" not in block)
    where = "" if not text or "Current thread" in text else " in a thread that runs no Python, such as gloo's"
    return f"died without a traceback ({name}{where})" + (f":\n{text}" if text else "")


def _collect(receivers: list[Connection], processes: Sequence[BaseProcess], store: str, timeout: float) -> list[Any]:
    rank_of = {receiver: rank for rank, receiver in enumerate(receivers)}
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = [receiver for receiver, rank in rank_of.items() if rank not in results]
        ready = wait(pending, timeout)
        if not ready:
            raise RankError(
                f"ranks {sorted(rank_of[r] for r in pending)} did not finish within {timeout:.0f} s; "
                "a collective that not every rank issues is the usual cause"
            )
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = rank_of[receiver]
            try:
                failure, value = receiver.recv()
            except EOFError:
                raise RankError(f"rank {rank} {_how_it_ended(processes[rank], _stacks(store, rank))}") from None
            if failure is not None:
                raise failure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]
