"""One FSDP2 model, trained eagerly and by its captured step in turn, against an eager one on real ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphpasses.capture import capture_train_step
from graphpasses.passes import default_pipeline
from tests.helpers.boundary_models import CrossRead, Interleaved, Reentrant, RunTwice, Scaled
from tests.helpers.models import Short, next_token_loss, parallelize
from tests.helpers.step_cases import (
    CASES,
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

NUM_STEPS = 4
OWN = CASES | {
    # Activations in fp32 go into bf16 modules, as rotary embeddings do, and come out in fp32.
    "casts": Case(Scaled, [["layers.0"], ["layers.1"]]),
    "no_input_casts": Case(
        Scaled,
        [["layers.0"], ["layers.1"]],
        MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False),
    ),
    "output_dtype": Case(Short, (), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32)),
    # As in cross-attention, several modules read one activation several times.
    "cross_read": Case(CrossRead, [["layers.0"], ["layers.1"], ["layers.2"]]),
    "interleaved_reads": Case(Interleaved, ()),
    "reentrant": Case(Reentrant, reshard_after_forward=None),
    "all_run_twice": Case(RunTwice, reshard_after_forward=None, num_backwards=2),
}

SEVERAL_RUNS = {"three_uses": (5, 3), "two_names": (3, 2), "all_run_twice": (8, 5), "interleaved": (4, 2)}


def train(case: Case) -> Outcome:
    torch.manual_seed(0)
    model = case.build()
    reference = copy.deepcopy(model)
    if case.tensor_parallel:
        model, reference = (parallelize(each, case.parallel_meshes[1]) for each in (model, reference))
    model, reference = (shard_eagerly(case, each) for each in (model, reference))
    # What four ranks show is the reduction; captures compare themselves with eager, and passes are proved, on two.
    is_checked = case.num_ranks == 2
    captured = capture_train_step(next_token_loss, model, *case.batch(0), check=is_checked)
    step = default_pipeline().run(captured, prove=None if is_checked else False)
    outcome = outcome_of(captured, step, reference, captured)

    def run(index: int, backward: int, batch: Batch) -> torch.Tensor:
        if (index + backward) % 3 == 1:  # the same live model, eagerly
            loss = next_token_loss(model, *batch)
            loss.backward()
            return loss
        with torch.no_grad():  # leaves the root unsharded
            next_token_loss(model, *batch)
        return (captured if index == 2 else step)(*batch)

    train_both(outcome, reference, model, case.batch, run, num_steps=NUM_STEPS, num_backwards=case.num_backwards)
    return outcome


def train_all() -> dict[str, Outcome]:
    """Runs on every rank."""
    return each_outcome(lambda name: train(OWN[name]), of_this_world(OWN))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return outcomes_by_case(train_all, 4, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OWN)
def test_equals_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    check_equals_eager(outcomes[name], NUM_STEPS * OWN[name].num_backwards)
    assert {each.layouts for each in outcomes[name]} == {"layouts are equal"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OWN)
def test_launches_as_many_collectives_as_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    outcome = outcomes[name][0]
    expected = dict(outcome.eager_collectives)
    if name in SEVERAL_RUNS:
        # FSDP2 frees a module that ran several times after each of its backwards and gathers it again.
        by_eager, by_graph = SEVERAL_RUNS[name]
        assert expected["all_gather_into_tensor"] == by_eager
        expected["all_gather_into_tensor"] = by_graph
    assert outcome.collectives == expected
