"""Times of gloo's collectives, alone and as the whole sequence of a step, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from experiments.harness.bench import time_on_ranks
from graphpasses.scale import Traffic, Transfer

__all__ = ["measure"]


def measure(transfers: Sequence[Transfer], steps: Sequence[Traffic], num_rounds: int) -> list[float]:
    """Times collectives on the default process group; all ranks call it together.

    Args:
        transfers: each is timed alone.
        steps: of each all collectives are timed together, one after the other, without anything in between.
        num_rounds: each is timed once a round, after one that is not counted.

    Returns:
        Seconds of the fastest round of each transfer, then of each step: the floor, to which the machine's other work
        adds. The slowest rank counts.
    """
    work = [(transfer,) for transfer in transfers] + [step.transfers for step in steps]
    buffers = {transfer: _buffers(transfer) for each in work for transfer in each}
    seconds: list[list[float]] = [[] for _ in work]
    for index in range(num_rounds + 1):
        for each, found in zip(work, seconds, strict=True):
            took = time_on_ranks(lambda each=each: [_run(transfer, *buffers[transfer]) for transfer in each])
            if index:
                found.append(took)
    return [min(found) for found in seconds]


def _buffers(transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.ones(transfer.num_bytes // 4)
    return whole, torch.ones(whole.numel() // transfer.num_ranks)


def _run(transfer: Transfer, whole: torch.Tensor, part: torch.Tensor) -> None:
    if transfer.collective == "all_gather":
        dist.all_gather_single(whole, part)
    elif transfer.collective == "reduce_scatter":
        dist.reduce_scatter_single(part, whole)
    else:
        dist.all_reduce(whole)
