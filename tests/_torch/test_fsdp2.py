"""What is read from FSDP2's groups beside their layout, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.fsdp2 import read_groups
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.plan import BucketPlan


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def sharded(reshard_after_forward: bool | None = None, *, root: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (4,))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward) if root else model


def resharded(model: nn.Module) -> list[bool]:
    return [bucket.reshard_after_forward for bucket in BucketPlan.from_fully_shard(model).resolve(model)]


def test_the_root_keeps_its_parameters_by_default() -> None:
    assert resharded(sharded()) == [True, True, False]


def test_an_explicit_choice_is_the_roots_too() -> None:
    assert resharded(sharded(True)) == [True, True, True]
    assert resharded(sharded(False)) == [False, False, False]


def test_without_a_wrapped_root_each_outermost_module_is_one() -> None:
    assert resharded(sharded(root=False)) == [False, False]


def test_zeros_for_unused_parameters_are_passed_on() -> None:
    model = sharded()
    model[1].set_reduce_scatter_unused_params(True)
    buckets = BucketPlan.from_fully_shard(model).resolve(model)
    assert [bucket.reduces_unused for bucket in buckets] == [False, True, False]


def test_a_group_computes_in_the_dtypes_of_what_it_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].bfloat16().requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    (group,) = read_groups(model).values()
    assert group.param_dtypes == {torch.float32}
    frozen = fully_shard(nn.LayerNorm(4).bfloat16().requires_grad_(False), mesh=init_device_mesh("cpu", (4,)))
    (group,) = read_groups(frozen).values()
    assert group.param_dtypes == {torch.bfloat16}


@pytest.mark.parametrize("turn_off", [FSDPModule.set_requires_gradient_sync, FSDPModule.set_requires_all_reduce])
def test_accumulation_without_reduction_is_refused(turn_off: Callable[[FSDPModule, bool], None]) -> None:
    model = sharded()
    turn_off(model, False)
    message = (
        "FSDP2 group '0' accumulates gradients without reducing them (set_requires_gradient_sync or "
        "set_requires_all_reduce is False), and how it reduces is to be read. Turn it on while it is"
    )
    with pytest.raises(UnsupportedError, match="^" + re.escape(message) + "$"):
        BucketPlan.from_fully_shard(model)
