"""Where a traced call is: the frames that torch itself keeps."""

from __future__ import annotations

import math
import queue
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode

from graphpasses import capture_train_step
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.step_tracer import _Frames


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.inner(x)) + 1


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.fx.wrap
def wrapped(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if wrapped is WRAPPED and math.floor is FLOOR else x.sin()


WRAPPED, FLOOR = wrapped, math.floor


def lines(model: nn.Module) -> list[str | None]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x).cos()

    graph = make_fx(function, record_stack_traces=True)(torch.ones(2, 2)).graph
    return [node.meta.get("stack_trace") for node in graph.nodes]


def test_nodes_have_the_lines_that_torch_gives_them() -> None:
    model = Twice()
    expected = lines(model)
    with mock.patch.object(fx.proxy, "CapturedTraceback", _Frames):
        assert lines(model) == expected
    assert any("helper(self.inner(x)) + 1" in (line or "") for line in expected)
    assert None in expected  # as those of calls outside of forward


@pytest.mark.slow
def test_a_trace_does_not_meet_the_numbers_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = SymNode.eq
    compared: queue.SimpleQueue[bool] = queue.SimpleQueue()  # which a step's code may change unseen

    def eq(self: SymNode, other: SymNode) -> SymNode:
        compared.put(self.shape_env is other.shape_env)
        return compare(self, other)

    monkeypatch.setattr(SymNode, "eq", eq)
    with fake_process_group(1):
        for _ in range(6):  # DTensor's cache finds an entry by where its numbers lay in memory
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
            fully_shard(model)
            capture_train_step(
                lambda model, x: model(x).sum(),
                model,
                torch.ones(1, 2),
                optimizer=torch.optim.AdamW(model.parameters()),
                check=False,
            )
    assert all(compared.get() for _ in range(compared.qsize()))


def test_functions_of_fx_wrap_are_what_they_are_in_eager() -> None:
    """A tracer of fx gives their names others while it traces."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return wrapped(model(x)).sum()

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert torch.equal(capture_train_step(loss_fn, model, x)(x), model(x).cos().sum())
    seen = []
    make_fx(lambda x: seen.append(wrapped is WRAPPED) or x)(x)
    assert seen == [False]
