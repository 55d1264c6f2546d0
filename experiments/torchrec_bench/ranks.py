"""What the ranks of a variant are asked to do; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from experiments.harness.interleaved import Rounds, interleave
from experiments.torchrec_bench.results import Floor, Measured, Results
from experiments.torchrec_bench.workloads import Variant, Workload

__all__ = ["measure"]

_PRELOAD = ("torchrec.models.dlrm", "torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


def measure(workload: Workload, num_rounds: int, say: Callable[[str], None]) -> Results:
    """Trains all variants of a workload in interleaved rounds.

    Args:
        workload: what to train.
        num_rounds: counted steps of each variant.
        say: called with what is done.

    Returns:
        What each cost, or why it failed.
    """
    variants = {variant: (workload, variant, num_rounds) for variant in workload.variants}
    return interleave(_on_rank, workload.num_ranks, variants, say, _PRELOAD)


def _on_rank(rounds: Rounds, workload: Workload, variant: Variant, num_rounds: int) -> Measured | Floor:
    warnings.simplefilter("ignore")  # TorchRec and FBGEMM warn of their own code
    from experiments.torchrec_bench.train import train_on_rank

    return train_on_rank(rounds, workload, variant, num_rounds)
