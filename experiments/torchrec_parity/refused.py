"""What TorchRec itself cannot do on CPU: each is tried, so that the table says so only as long as it is true."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torchrec import JaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from experiments.torchrec_parity.cases import Case
from experiments.torchrec_parity.models import batch, build

__all__ = ["try_refused"]


def _optimizer(name: str) -> Callable[[], object]:
    return lambda: build(Case("", ("table-wise",), name), lr=0.1)


def _index_dedup() -> None:
    case = Case("", ("table-wise",), "sgd", kind="ec")
    model = build(case, lr=0.1, sharders=[EmbeddingCollectionSharder(use_index_dedup=True)])
    model(*batch(case, 0, dist.get_rank()))


def _two_dimensional() -> None:
    DMPCollection(nn.Linear(1, 1), torch.device("cpu"), ShardingPlan({}), 2, 1, dist.group.WORLD)


def _multi_probe_hash() -> None:
    table = HashZchManagedCollisionModule(8, torch.device("cpu"), total_num_buckets=1, input_hash_size=64)
    table.remap({"f0": JaggedTensor(torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))})


# What is tried, and a part of the message with which TorchRec refuses it.
_ATTEMPTS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name} for tables": (_optimizer(name), "not supported in CPU mode")
        for name in ("adam", "partial row-wise adam", "lamb", "lars")
    },
    "EC with index dedup": (_index_dedup, "Could not run 'fbgemm::jagged_unique_indices'"),
    "2D sharding (DMPCollection)": (_two_dimensional, "only supports CUDA"),
    "multi-probe zero-collision hash": (_multi_probe_hash, "Expected readonly to be true"),
}


def try_refused() -> dict[str, tuple[str, bool]]:
    """Tries everything; all ranks call it together.

    Returns:
        For each, how TorchRec refuses it (empty if it does not), and whether that is the known reason.
    """
    refusals = {}
    for name, (attempt, known) in _ATTEMPTS.items():
        message = ""
        try:
            attempt()
        except (AssertionError, RuntimeError) as error:
            message = f"{type(error).__name__}: {error}".split(". ")[0]
        refusals[name] = (message, known in message)
    return refusals
