"""What the ranks are asked to do; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from experiments.harness.outcome import Outcomes
from experiments.torchrec_parity.cases import LOCAL_SIZE
from experiments.torchrec_support.cells import Cell

__all__ = ["PRELOAD", "try_cells"]

PRELOAD = ("torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


def try_cells(cells: Sequence[Cell], outcomes: Outcomes, folder: Path) -> None:
    """Tries cells, until one leaves ranks waiting for each other; all ranks call it together.

    Args:
        cells: which.
        outcomes: file for what came of them.
        folder: an empty one, where the ranks meet.
    """
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    warnings.simplefilter("ignore")  # and TorchRec's and FBGEMM's imports warn of their own code
    os.environ["LOCAL_WORLD_SIZE"] = str(min(LOCAL_SIZE, dist.get_world_size()))
    from experiments.torchrec_support.train import train_cells

    _meet_again(folder / "cells")
    for cell, outcome in train_cells(cells):
        if dist.get_rank() == 0:
            outcomes.add(cell.name, outcome)
            print(f"{cell.name}: {outcome.kind} {outcome.detail}", flush=True)
    _meet_again(folder / "end")


def _meet_again(store: Path) -> None:
    """Makes the ranks' process group anew, in which none waits for long for one that failed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store.absolute()}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(minutes=3),
    )
