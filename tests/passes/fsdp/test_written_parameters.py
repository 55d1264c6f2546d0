"""Parameters that a step writes between all-gathers are gathered where they were, before and after the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.gloo import ALL_GATHER
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.passes import (
    BucketFSDPCollectives,
    DeduplicateShared,
    PrefetchCollectives,
    ReshardAfterForward,
    ScheduleCollectives,
    default_pipeline,
)
from graphpasses.passes.runner import GraphPass, Pipeline

PLAN = BucketPlan.from_modules([["0", "1", "2"]])
PASSES = (
    DeduplicateShared(),
    BucketFSDPCollectives(PLAN),
    ReshardAfterForward(PLAN),
    PrefetchCollectives(),
    ScheduleCollectives(),
)


def writes_shards(model: nn.Module, x: Tensor) -> Tensor:
    """Writes all parameters, by an operator that returns none, between two calls of the first layer."""
    first, second, third = model.children()
    x = second(first(x))
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 0.5)
    return first(third(x)).square().sum()


def writes_gathered(model: nn.Module, x: Tensor) -> Tensor:
    """Writes what was gathered of the second layer, which backward reads."""
    first, second, third = model.children()
    weight = second.weight.detach()
    torch._foreach_mul_([weight], 0.5)
    return third(first(x) @ weight).square().sum()


def gathers(step: CapturedStep) -> list[tuple[fx.Node, bool]]:
    """Returns what all-gathers send, in order, and whether each is behind a write of a list."""
    nodes = [*step.graph.nodes]
    write = next((index for index, node in enumerate(nodes) if "_foreach_mul_" in str(node.target)), len(nodes))
    return [(node.args[0], index > write) for index, node in enumerate(nodes) if node.target == ALL_GATHER]


def capture(loss_fn: Callable[..., Tensor]) -> CapturedStep:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = simple_fsdp(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))), mesh)
    return capture_train_step(loss_fn, model, torch.ones(2, 4), check=False)


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_gathers_stay_on_their_side_of_a_write(p: GraphPass) -> None:
    with fake_process_group(2):
        step = capture(writes_shards)
        rewritten = Pipeline((p,)).run(step)  # which is proved
        names = [[(str(read), is_behind) for read, is_behind in gathers(each)] for each in (step, rewritten)]
        assert names[0] == names[1]
        assert [is_behind for _, is_behind in names[0]] == [False, False, True, True]


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_what_is_written_of_a_gathered_parameter_is_not_gathered_again(p: GraphPass) -> None:
    with fake_process_group(2):
        rewritten = Pipeline((p,)).run(capture(writes_gathered))
        num_gathers = {"bucket-fsdp-collectives": 1, "reshard-after-forward": 4}  # the third layer's again
        assert len(gathers(rewritten)) == num_gathers.get(p.name, 3)


def test_a_note_names_what_a_bucket_leaves_out() -> None:
    with fake_process_group(2):
        (report,) = Pipeline((BucketFSDPCollectives(PLAN),)).run(capture(writes_shards)).report.passes
        assert "written by this step, keep their own all-gathers: 0.weight, 1.weight, 2.weight" in report.notes


@torch.library.custom_op("written_tests::product", mutates_args=("out",))
def product(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Writes a product, as kernels of users do, and returns none."""
    out.copy_(x @ y)


@product.register_fake
def _(out: Tensor, x: Tensor, y: Tensor) -> None:
    return None


class Product(torch.autograd.Function):
    """A linear layer whose backward's kernel writes into memory that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        product(of_x, gradient, weight)
        product(of_weight, gradient.t(), x)
        return of_x, of_weight


def test_kernels_that_return_nothing_read_what_passes_gather_again() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model:
            x = Product.apply(x, layer.weight)
        return x.square().sum()

    with fake_process_group(2):
        step = capture(loss_fn)
        rewritten = default_pipeline(BucketPlan.from_modules([["0"], ["1"], ["2"]])).run(step)
        assert rewritten.report["reshard-after-forward"].num_rewrites == 3
