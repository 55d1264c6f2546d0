"""Captured steps of SimpleFSDP models against eager FSDP2 on real ranks, bit for bit over AdamW steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from graphpasses._torch.tested_versions import RELEASE
from graphpasses.capture import capture_train_step, simple_fsdp, unrounded_gradients
from graphpasses.fsdp import BucketPlan, eager_layout
from graphpasses.graph import TrainGraph
from graphpasses.passes import default_pipeline
from tests.helpers.models import next_token_loss, parallelize
from tests.helpers.step_cases import (
    CASES,
    SIMPLE_CASES,
    Batch,
    Case,
    Outcome,
    check_equals_eager,
    each_outcome,
    of_this_world,
    outcome_of,
    outcomes_by_case,
    shard_eagerly,
    train_both,
)

NUM_STEPS = 3
# What the comparison must be able to see: the same captured step, rewritten otherwise, or captured otherwise.
REWRITTEN = {
    "tied": replace(CASES["tied"], disable=("coalesce-grad-reductions",)),
    "hybrid": replace(CASES["hybrid"], disable=("bucket-fsdp-collectives",)),
    "nccl_order": replace(CASES["nccl_order"], is_reversed=True),
}
ROUNDED = {
    f"{name}_rounded": replace(CASES[name], is_rounded=True)
    for name in ("promoting", "tensor_parallel_fp32_reduce")
    if RELEASE >= (2, 15)
}


def plan_of(case: Case, eager: nn.Module) -> BucketPlan:
    plan = BucketPlan.from_fully_shard(eager)
    if case.is_reversed:
        entries = (replace(entry, fqns=entry.fqns[::-1]) for entry in plan.entries)
        plan = replace(plan, entries=tuple(entries))
    return plan


def is_checked(case: Case) -> bool:
    """On four ranks other files compare captures with eager, and prove, but for those over tensor parallelism."""
    return case.num_ranks == 2 or case.tensor_parallel


def capture(case: Case, model: nn.Module) -> TrainGraph:
    simple_fsdp(
        model,
        case.mesh,
        param_dtype=case.policy.param_dtype,
        reduce_dtype=case.policy.reduce_dtype,
        shard_dim=case.shard_dim,
    )
    is_kept = unrounded_gradients.KEEPS_GRADIENT_DTYPES and not case.is_rounded
    with mock.patch.object(unrounded_gradients, "KEEPS_GRADIENT_DTYPES", is_kept):
        return capture_train_step(next_token_loss, model, *case.batch(0), check=is_checked(case))


def rewrite(case: Case, captured: TrainGraph, eager: nn.Module) -> TrainGraph:
    expected_layout = None if case.disable or case.is_reversed else eager_layout(eager)
    pipeline = default_pipeline(plan_of(case, eager), expected_layout=expected_layout, disable=case.disable)
    return pipeline.run(captured, prove=None if is_checked(case) else False)


def train(case: Case, other: Case | None = None) -> Outcome:
    """Trains a case, and then, for a control, by the step that is rewritten as for another one."""
    torch.manual_seed(0)
    model = case.build()
    eager = copy.deepcopy(model)
    if case.tensor_parallel:
        model, eager = (parallelize(each, case.parallel_meshes[1]) for each in (model, eager))
    eager = shard_eagerly(case, eager)
    captured = capture(case, model)
    step = rewrite(case, captured, eager)
    outcome = outcome_of(captured, step, eager, step)

    def run(index: int, backward: int, batch: Batch) -> torch.Tensor:
        return step(*batch)

    train_both(outcome, eager, model, case.batch, run, num_steps=NUM_STEPS, num_backwards=case.num_backwards)
    if other is not None:
        step = rewrite(other, captured, eager)
        outcome.control = Outcome()
        train_both(outcome.control, eager, model, case.batch, run, num_steps=1)
    return outcome


def train_all() -> dict[str, Outcome]:
    """Runs on every rank."""
    cases = SIMPLE_CASES | ROUNDED
    return each_outcome(lambda name: train(cases[name], REWRITTEN.get(name)), of_this_world(cases))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return outcomes_by_case(train_all, 4, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SIMPLE_CASES)
def test_equals_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    check_equals_eager(outcomes[name], NUM_STEPS * SIMPLE_CASES[name].num_backwards)
    assert {each.layouts for each in outcomes[name]} == {"layouts are equal"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SIMPLE_CASES)
def test_launches_as_many_collectives_as_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    outcome = outcomes[name][0]
    assert not outcome.error
    expected = dict(outcome.eager_collectives)
    if name == "resharded":
        assert expected == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 3}
    if name in ("three_uses", "interleaved", "two_names"):
        # FSDP2 frees a module that ran several times after each of its backwards and gathers it again.
        assert expected["all_gather_into_tensor"] == {"three_uses": 5, "interleaved": 4, "two_names": 3}[name]
        expected["all_gather_into_tensor"] = expected["reduce_scatter_tensor"]
    assert outcome.collectives == expected


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*REWRITTEN, *ROUNDED])
def test_control_differs(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert not any(each.error for each in outcomes[name])
    controls = [each.control or each for each in outcomes[name]]
    assert not all(each.is_equal for each in controls)
    assert controls[0].losses[0]
