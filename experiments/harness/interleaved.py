"""Interleaved rounds of variants that each need processes of their own, since they differ in memory or compile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch.distributed as dist

from graphpasses.parity.launch import RankError, run_ranks

__all__ = ["Rounds", "interleave"]

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Rounds:
    """What a variant's ranks have of the rounds: only one variant works at a time.

    Args:
        connection: to the process that starts each round; rank 0 uses it.
    """

    connection: Connection

    @contextmanager
    def next(self) -> Iterator[list[str]]:
        """Waits until the variant may take a step; all ranks call it together.

        Yields:
            A list for what is to be printed when the step is done.
        """
        lines: list[str] = []
        if dist.get_rank() == 0:
            self.connection.recv()
        dist.barrier()
        yield lines
        dist.barrier()
        if dist.get_rank() == 0:
            self.connection.send(lines)


def interleave(
    measure: Callable[..., Any],
    num_ranks: int,
    variants: Mapping[V, tuple[Any, ...]],
    say: Callable[[str], None],
    preload: Sequence[str],
) -> dict[V, Any | str]:
    """Starts all variants; each takes its steps in rounds with the others.

    Args:
        measure: called on every rank of a variant as ``measure(rounds, *args)``; it takes every step inside
            :meth:`Rounds.next`, and returns what it measured.
        num_ranks: processes of a variant.
        variants: ``args`` by variant.
        say: called with what the variants print.
        preload: what all need, so that none counts it as its own memory; see :func:`run_ranks`.

    Returns:
        By variant what rank 0 measured, or why it failed.
    """
    with ThreadPoolExecutor(len(variants)) as pool:
        running: dict[V, tuple[Connection, Connection, Future[list[Any]]]] = {}
        for variant, args in variants.items():
            ours, theirs = Pipe()
            given = (measure, num_ranks, Rounds(theirs), *args)
            running[variant] = ours, theirs, pool.submit(run_ranks, *given, preload=preload, timeout=7200.0)
        while not all(future.done() for *_, future in running.values()):
            for variant, (connection, _, future) in running.items():
                connection.send(None)
                while not future.done():
                    if connection.poll(0.1):
                        for line in connection.recv():
                            say(f"{variant}: {line}")
                        break
        return {variant: _result(future) for variant, (*_, future) in running.items()}


def _result(future: Future[list[Any]]) -> Any | str:
    error = future.exception()
    if isinstance(error, RankError):
        return str(error)
    return future.result()[0]
