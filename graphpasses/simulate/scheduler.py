"""Ranks as threads of one process, of which one runs at a time.

A rank hands over where it waits for others. So runs are repeatable, ranks never meet inside a library that was not
made for threads, and a deadlock is seen at once.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from graphpasses.errors import ClusterError, GraphPassesError
from graphpasses.simulate.rings import Topology

T = TypeVar("T")


class _Current(threading.local):
    rank: int
    scheduler: RankScheduler | None = None


current = _Current()
"""Which rank this thread is, and of which scheduler; None outside of :meth:`RankScheduler.run`."""


# Seconds: an interrupt that comes just before a thread begins to wait does not wake it.
_MAX_WAIT = 0.2


class _StoppedError(BaseException):
    """Ends a rank when another one has failed."""


@dataclass
class Call:
    """What a rank brings to where the ranks of a group meet."""

    name: str
    detail: str = ""  # what else of it must be equal on all ranks
    data: Any = None
    result: Any = None  # what the rank takes away

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".rstrip()


class RankScheduler:
    """Lets one rank run at a time, and brings those of a group together."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._turns = [threading.Semaphore(0) for _ in range(topology.num_ranks)]
        self._ready = deque(range(topology.num_ranks))
        # Collectives that not every rank has reached: the ranks of the group, and the calls of those that have.
        self._meetings: dict[object, tuple[tuple[int, ...], dict[int, Call]]] = {}
        self._failure: ClusterError | None = None

    def run(self, play: Callable[[int], T]) -> list[T]:
        """Plays all ranks; returns or raises when none runs any more."""
        results: dict[int, T] = {}

        def thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                self._go_on()
                current.rank, current.scheduler = rank, self
                results[rank] = play(rank)
            except _StoppedError:
                pass
            except BaseException as error:
                is_refusal = isinstance(error, GraphPassesError)  # which says itself where and why
                why = f" {error}" if is_refusal else f"\n{traceback.format_exc()}"
                failure = ClusterError(f"rank {rank} failed:{why}")
                # As `raise failure from None` would: known, but printed once.
                failure.__context__, failure.__suppress_context__ = error, True
                self._fail(failure)
            self._hand_over()
            ended.release()

        ended = threading.Semaphore(0)
        random = torch.get_rng_state()
        threads = [
            threading.Thread(target=thread, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.topology.num_ranks)
        ]
        try:
            for each in threads:
                each.start()
            self._hand_over()
            for _ in threads:  # an interrupt of join() would take its thread for ended
                while not ended.acquire(timeout=_MAX_WAIT):
                    pass
        except KeyboardInterrupt:  # every rank ends at its next collective; a second interrupt does not wait
            self._failure = ClusterError("the cluster was interrupted")
            begun = [each for each in threads if each.ident is not None]
            if len(self._ready) == len(threads):  # none has had its turn
                self._ready = deque(range(len(begun)))
                self._hand_over()
            for each in begun:
                each.join()
            raise
        finally:
            torch.set_rng_state(random)
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.topology.num_ranks)]

    def meet(
        self, key: object, ranks: tuple[int, ...], rank: int, call: Call, perform: Callable[[Sequence[Call]], None]
    ) -> None:
        """Waits until every rank of a group has called; the last to come performs for all, with the calls by rank."""
        self._go_on()
        _, calls = self._meetings.setdefault(key, (ranks, {}))
        calls[rank] = call
        if len(calls) < len(ranks):
            random = torch.get_rng_state()
            self._hand_over()
            self._turns[rank].acquire()
            self._go_on()
            torch.set_rng_state(random)
            return
        issued = {each: str(call) for each, call in calls.items()}
        in_order = [calls[each] for each in ranks]
        del calls[rank]  # it need not be woken if this fails
        if len(set(issued.values())) > 1:
            what = f"{_by_text(issued)} (group of {_ranks(ranks)})"
            self._fail(ClusterError(f"ranks issue different collectives: {what}"))
            raise _StoppedError
        perform(in_order)
        del self._meetings[key]
        self._ready.extend(each for each in ranks if each != rank)

    def _hand_over(self) -> None:
        """Lets the next rank run, if there is one."""
        if not self._ready and self._meetings:
            self._fail(ClusterError(f"deadlock, ranks wait for each other: {self._waiting()}"))
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _go_on(self) -> None:
        if self._failure is not None:
            raise _StoppedError

    def _fail(self, failure: ClusterError) -> None:
        """Wakes every rank that waits, to end."""
        self._failure = self._failure or failure
        self._ready.extend(rank for _, calls in self._meetings.values() for rank in calls)
        self._meetings.clear()

    def _waiting(self) -> str:
        waiting = dict.fromkeys(range(self.topology.num_ranks), "not waiting: it has ended")
        for ranks, calls in self._meetings.values():
            for rank, call in calls.items():
                waiting[rank] = f"in {call} of the group of {_ranks(ranks)}"
        return _by_text(waiting)


def _by_text(texts: Mapping[int, str]) -> str:
    """Says what ranks do, what most do last."""
    counts = Counter(texts.values())
    ranks = {text: tuple(rank for rank, its in sorted(texts.items()) if its == text) for text in counts}
    return "; ".join(f"{_ranks(ranks[text])}: {text}" for text in sorted(counts, key=lambda t: (counts[t], ranks[t])))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, …, {ranks[-1]} ({len(ranks)})"
    return f"ranks {', '.join(map(str, ranks))}"
