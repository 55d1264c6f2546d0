"""Which optimizers update an element alike, in whatever shard it lies, and that the check sees which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses.errors import UnsupportedError

ELEMENTWISE = {
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


def made(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([nn.Parameter(torch.zeros(3, dtype=dtype))], **options)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_float32_parameters(name: str, foreach: bool) -> None:
    gp.check_canonical_update(made(name, foreach=foreach, **ELEMENTWISE[name]))


@pytest.mark.parametrize(
    ("name", "dtype", "options", "what"),
    [
        ("SGD", torch.float32, {"fused": True}, r"SGD with fused=True updates torch\.float32"),
        ("Adam", torch.float32, {"fused": True}, r"Adam with fused=True updates torch\.float32"),
        ("RMSprop", torch.bfloat16, {"foreach": True}, r"RMSprop with foreach=True updates torch\.bfloat16"),
        (
            "SGD",
            torch.bfloat16,
            {},
            r"SGD updates torch\.bfloat16 parameters on cpu otherwise where a shard's",
        ),
    ],
)
def test_vectors_and_what_is_left_of_them(name: str, dtype: torch.dtype, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        gp.check_canonical_update(made(name, dtype, **options, **ELEMENTWISE[name]))


def test_what_is_not_elementwise() -> None:
    optimizer = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(UnsupportedError, match="Muon cannot be tried on shards"):
        gp.check_canonical_update(optimizer)


def test_nothing_of_the_optimizer_changes() -> None:
    optimizer = made("AdamW")
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = str(optimizer.state_dict()), parameter.detach().clone()
    gp.check_canonical_update(optimizer)
    assert str(optimizer.state_dict()) == before[0]
    assert torch.equal(parameter, before[1])
