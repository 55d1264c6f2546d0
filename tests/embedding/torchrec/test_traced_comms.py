"""Quantized communications: eager's bits whatever the precisions of embeddings and gradients are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Case  # loads TorchRec without its warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from graphpasses.embedding.torchrec.traced_comms import check_codecs
from graphpasses.errors import UnsupportedError
from graphpasses.parity.launch import run_ranks
from tests.helpers.recommenders import (
    DIM,
    Compiled,
    bags,
    batch_sizes_per_feature,
    differences,
    ids,
    same,
    sequences,
    state_of,
)

TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
RW, CW = plans.row_wise(), plans.column_wise(ranks=[0, 1])
FP32, FP16 = CommType.FP32, CommType.FP16


class Small(nn.Module):
    """Its gradients, some 1e-7, are subnormal in FP16."""

    def __init__(self, num_tables: int, with_sequences: bool) -> None:
        super().__init__()
        self.bags = bags(num_tables)
        self.sequences = sequences(num_tables) if with_sequences else None
        self.score = nn.Linear(DIM * num_tables, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        loss = self.score(self.bags(features).values()).sum()
        if self.sequences is not None:
            loss = loss + sum(jagged.values().sin().sum() for jagged in self.sequences(features).values())
        return loss * 1e-6


def one(rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, 2),)


def variable(rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (batch_sizes_per_feature(rank, step),)


def case(forward: CommType, backward: CommType, kind: str = "bags", scale: float | None = None) -> Case:
    """Returns a model whose bags have these precisions, and its sequences these the other way round."""
    sharders = [
        sharder(
            qcomm_codecs_registry=get_qcomm_codecs_registry(
                QCommsConfig(*precisions, forward_loss_scale=scale, backward_loss_scale=scale),
                device=torch.device("cpu"),
            )
        )
        for sharder, precisions in (
            (EmbeddingBagCollectionSharder, (forward, backward)),
            (EmbeddingCollectionSharder, (backward, forward)),
        )
    ]
    options = {"optimizer": torch.optim.Adagrad, "num_steps": 2, "sharders": sharders}
    if kind == "vbe":
        options["optimizer"] = torch.optim.SGD  # FBGEMM has no Adagrad for them
        return Case(partial(Small, 2, False), (TW0, TW1), variable, **options)
    shardings = (TW0, RW, TW1, RW) if kind == "sequences" else (CW, RW)
    return Case(partial(Small, 2, kind == "sequences"), shardings, one, **options)


CASES: dict[str, Callable[[], Case]] = {
    "FP16, FP16, scaled": lambda: case(FP16, FP16, scale=2.0**8),
    "FP32, FP16, and sequences in FP16, FP32": lambda: case(FP32, FP16, "sequences"),
    "FP16, FP16, batch sizes per feature": lambda: case(FP16, FP16, "vbe"),
}


def not_quantized() -> list[str]:
    """Returns no problem if neither precision leaves the bits as they are."""
    states = []
    for precisions in ((FP32, FP32), (FP16, FP32), (FP32, FP16)):
        model = case(*precisions).sharded()
        model(*one(dist.get_rank(), 0)).backward()
        model(*one(dist.get_rank(), 0)).backward()
        states.append(state_of(model))
    return ["equal all the same"] if same(states[0], states[1]) or same(states[0], states[2]) else []


def refused() -> list[str]:
    """Returns what a precision that sends scales does instead of being named."""
    try:
        Compiled(case(CommType.INT8, FP16).sharded())(*one(dist.get_rank(), 0))
    except UnsupportedError as error:
        start = "'bags': quantized communications whose forward precision is torch.uint8 cannot be compiled, since "
        return [] if str(error).startswith(start) else [str(error)]
    return ["accepted"]


def check_all() -> dict[str, list[str]]:
    found = {name: differences(make()) for name, make in CASES.items()}
    return found | {"not_quantized": not_quantized(), "refused": refused()}


@pytest.mark.multiprocess
def test_on_2_ranks() -> None:
    found = run_ranks(check_all, 2)
    assert found == [{name: [] for name in found[0]}] * 2


def test_the_direction_is_named() -> None:
    module = nn.Module()
    module._module_fqn = "ebc"
    codecs = SimpleNamespace(
        forward=SimpleNamespace(quantized_dtype=torch.float16),
        backward=SimpleNamespace(quantized_dtype=torch.uint8),
    )
    module.qcomm_codecs_registry = {"POOLED_EMBEDDINGS_ALL_TO_ALL": codecs}
    with pytest.raises(UnsupportedError) as error:
        check_codecs(module)
    assert str(error.value) == (
        "'ebc': quantized communications whose backward precision is torch.uint8 cannot be compiled, since scales "
        "travel among the numbers; use FP32, FP16 or BF16 in QCommsConfig, or leave the model uncompiled"
    )
