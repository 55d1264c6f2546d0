"""What the ranks are asked to do; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.harness.parity import TrainedRun
from experiments.torchrec_parity.cases import LOCAL_SIZE, Case

__all__ = ["PRELOAD", "train_cases", "try_refused"]

PRELOAD = ("torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


def train_cases(cases: Sequence[Case], num_steps: int, folder: Path) -> Iterator[TrainedRun]:
    """Trains every variant of cases that have this number of ranks; see :mod:`experiments.torchrec_parity.train`."""
    _set_up()
    from experiments.torchrec_parity import train

    return train.train_cases(cases, num_steps, folder)


def try_refused() -> dict[str, tuple[str, bool]]:
    """Tries what TorchRec cannot do on CPU; see :mod:`experiments.torchrec_parity.refused`."""
    _set_up()
    from experiments.torchrec_parity import refused

    return refused.try_refused()


def _set_up() -> None:
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    warnings.simplefilter("ignore")  # and TorchRec's and FBGEMM's imports warn of their own code
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL_SIZE)
