"""Runs every variant of a work in processes of its own; they take turns, a step each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from experiments.torchrec_bench.works import Variant, Work
from experiments.torchrec_parity.ranks import Calls
from graphpasses.parity.launch import RankError, run_ranks

__all__ = ["Measured", "measure"]

# What all need, so that none counts it as its own memory.
_PRELOAD = ("torchrec.models.dlrm", "torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Measured:
    """What the training of a variant cost.

    Args:
        seconds: of each counted step: forward, backward, optimizers.
        first_step: seconds of the first step, which compiles.
        first_peak_mib: peak memory beyond what its processes had when they began, all ranks together, while the model
            is built and the first steps are compiled and run.
        peak_mib: the same, of the counted steps.
        calls: collectives and table lookups of a step on rank 0.
    """

    seconds: tuple[float, ...]
    first_step: float
    first_peak_mib: float
    peak_mib: float
    calls: Calls


def measure(work: Work, num_rounds: int, say: Callable[[str], None]) -> dict[Variant, Measured | str]:
    """Trains all variants of a work.

    Only one runs at a time, and each round runs a step of each, so that a machine that slows down slows all alike.

    Args:
        work: what to train.
        num_rounds: counted steps of each variant.
        say: called with what is done.

    Returns:
        What each cost, or why it failed.
    """
    with ThreadPoolExecutor(len(work.variants)) as pool:
        players: dict[Variant, tuple[Connection, Connection, Future[list[Measured]]]] = {}
        for variant in work.variants:
            ours, theirs = Pipe()
            args = (work, variant, num_rounds, theirs)
            future = pool.submit(run_ranks, _on_rank, work.num_ranks, *args, preload=_PRELOAD, timeout=7200.0)
            players[variant] = ours, theirs, future
        while not all(future.done() for *_, future in players.values()):
            for variant, (turns, _, future) in players.items():
                turns.send(None)
                while not future.done():
                    if turns.poll(0.1):
                        for text in turns.recv():
                            say(f"{variant}: {text}")
                        break
        return {variant: _result(future) for variant, (*_, future) in players.items()}


def _result(future: Future[list[Measured]]) -> Measured | str:
    error = future.exception()
    if isinstance(error, RankError):
        return str(error)
    return future.result()[0]


def _on_rank(work: Work, variant: Variant, num_rounds: int, turns: Connection) -> Measured:
    warnings.simplefilter("ignore")  # TorchRec and FBGEMM warn of their own code
    from experiments.torchrec_bench.train import train_on_rank

    return train_on_rank(work, variant, num_rounds, turns)
