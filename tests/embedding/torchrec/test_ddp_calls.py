"""DistributedDataParallel's part of a compiled call; with real reducers see test_capture.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.embedding.torchrec.ddp_calls import DDPCalls
from graphpasses.errors import UnsupportedError


class FakeDDP(DistributedDataParallel):
    """One that is not wired to a process group."""

    def __init__(self, log: list[str], name: str, module: nn.Module, mixed_precision: Any = None) -> None:
        nn.Module.__init__(self)
        self.log, self.name, self.module, self.mixed_precision = log, name, module, mixed_precision

    def _pre_forward(self, *inputs: Any) -> None:
        self.log.append(f"before {self.name}")

    def _post_forward(self, outputs: Any) -> Any:
        self.log.append(f"after {self.name}")
        return (*outputs, self.name)


def test_ddp_calls_nest() -> None:
    log: list[str] = []
    sharded = nn.Linear(1, 1)
    sharded._lookups = [FakeDDP(log, "table", nn.Linear(1, 1))]
    table, outer = sharded._lookups[0], FakeDDP(log, "outer", nn.Sequential(sharded, sharded))
    unused = FakeDDP(log, "unused", nn.Linear(1, 1))
    calls = DDPCalls([outer, unused])
    with calls.call() as call:
        call.begin()  # nothing is known to run yet
        call.traced(outer)
        call.traced(table)
        call.traced(table)
    assert call.end(()) == ("table", "outer")
    with calls.call() as call:
        call.begin()
    assert call.end(()) == ("table", "outer")
    assert log == ["before outer", "before table", "after table", "after outer"] * 2


def test_a_module_that_nothing_leads_to_is_refused() -> None:
    with DDPCalls([]).call() as call, pytest.raises(UnsupportedError) as error:
        call.traced(FakeDDP([], "hidden", nn.Linear(1, 1)))
    assert str(error.value) == (
        "the compiled function calls a DistributedDataParallel around Linear that nothing it holds leads to, so that "
        "its gradients would not be reduced; compile the module itself, or a method or closure of what holds it"
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_module_may_be_made_after_the_first_call(num_ranks: int) -> None:
    """``DistributedModelParallel.init_data_parallel()`` puts one into the model."""
    with fake_process_group(num_ranks):
        root = nn.Sequential(nn.Linear(1, 1))
        calls = DDPCalls([root])
        root[0] = late = DistributedDataParallel(root[0])
        with calls.call() as call:
            if num_ranks == 2:
                call.traced(late)
                assert call.is_told(late)
                return
            with pytest.raises(UnsupportedError) as error:
                call.traced(late)
    assert str(error.value) == (
        "a DistributedDataParallel was put around Linear after the first call of the compiled model, and on more "
        "than two ranks its first steps must run as in eager: call init_data_parallel() before it"
    )


def test_mixed_precision_ddp_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mixed_precision=\.\.\.\) around Linear cannot be compiled"):
        DDPCalls([FakeDDP([], "outer", nn.Linear(1, 1), mixed_precision=object())])


def test_gradients_come_in_one_order() -> None:
    modules = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    calls = DDPCalls([FakeDDP([], str(i), module) for i, module in enumerate(modules)])
    order: list[int] = []
    weights = [module.weight for module in modules]
    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    compiled = calls.in_order(lambda *inputs: torch.stack(inputs).sum())
    for inputs in (weights, weights[::-1], weights[1:] + weights[:1]):
        order.clear()
        compiled(*inputs).backward()
        assert order == [0, 1, 2]
    with torch.no_grad():
        assert not compiled(*weights).requires_grad
