"""What the ranks are asked to do; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from experiments.torchrec_support.cells import Cell
from experiments.torchrec_support.outcome import Outcome

__all__ = ["PRELOAD", "try_cells"]

PRELOAD = ("torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


def try_cells(cells: Sequence[Cell]) -> list[Outcome]:
    """Tries cells; all ranks call it together."""
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    warnings.simplefilter("ignore")  # and TorchRec's and FBGEMM's imports warn of their own code
    from experiments.torchrec_support.train import train_cells

    outcomes = []
    for cell, outcome in train_cells(cells):
        outcomes.append(outcome)
        if dist.get_rank() == 0:
            print(f"{cell.name}: {outcome.kind} {outcome.detail}", flush=True)
    return outcomes
