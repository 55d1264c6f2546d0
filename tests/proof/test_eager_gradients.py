"""Gradients of a SimpleFSDP model's step, proved against where eager FSDP2 reduces them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep
from graphpasses.simulate import Topology
from tests.proof.steps import NUM_RANKS, RANK, calls, capture, plain, sharded


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_process_group(NUM_RANKS, RANK):
        yield


@pytest.fixture(scope="module")
def simple() -> CapturedStep:
    return capture(plain())


def test_what_is_not_proved_is_reported(simple: CapturedStep) -> None:
    plan = gp.BucketPlan.from_fully_shard(sharded())
    pipeline = gp.default_pipeline(plan)  # without eager's layout
    report = pipeline.run(simple).report
    assert report is not None
    why = "its summands are autograd's, but where eager reduces it was not given"
    last = str(report).splitlines()[-1]
    assert last.startswith("not proved: the gradient of '")
    assert last.endswith(f" more: {why}")
    with pytest.raises(ProofError, match=r"^prove=True: the gradient of '.+' is not proved: its summands are "):
        pipeline.run(simple, prove=True)


def test_simple_fsdp_is_proved_against_eagers_layout(simple: CapturedStep) -> None:
    eager = sharded()
    plan, layout = gp.BucketPlan.from_fully_shard(eager), gp.eager_layout(eager)
    rewritten = gp.default_pipeline(plan, expected_layout=layout).run(simple)
    certificate = gp.prove(simple, rewritten, layout=layout)
    assert certificate
    assert "eager's place" in certificate.axioms
    # Without it, it is not known where eager reduces.
    unproved = dict(gp.prove(simple, rewritten).unproved)
    assert unproved["the gradient of 'one.weight'"] == (
        "its summands are autograd's, but where eager reduces it was not given"
    )


def test_another_place_is_not_eagers(simple: CapturedStep) -> None:
    """Control: buckets in another order put gradients at other offsets."""
    eager = sharded()
    plan = gp.BucketPlan.from_modules([["two", "one"]], gp.Reduction(dtype=torch.float32))
    rewritten = gp.default_pipeline(plan).run(simple)
    with pytest.raises(ProofError, match=r"byte offset: \d+, eager has \d+|bytes of the bucket"):
        gp.prove(simple, rewritten, layout=gp.eager_layout(eager))


def test_another_place_is_right_where_nccl_adds_alike() -> None:
    step, layout = capture(plain(width=160)), gp.eager_layout(sharded(width=160))
    plan = gp.BucketPlan.from_modules([["two", "one"]], gp.Reduction(dtype=torch.float32))
    rewritten = gp.default_pipeline(plan).run(step)
    in_a_node = Topology(NUM_RANKS, gpus_per_node=NUM_RANKS, mode="shared")
    certificate = gp.prove(step, rewritten, layout=layout, topology=in_a_node)
    assert certificate
    assert "eager's order" in certificate.axioms
    # Control: of two nodes, channels have rings that go other ways.
    apart = Topology(NUM_RANKS, gpus_per_node=2)
    with pytest.raises(ProofError, match=r"byte offset: \d+, eager has \d+|bytes of the bucket"):
        gp.prove(step, rewritten, layout=layout, topology=apart)
    needs = r"^topology says in which order gradients are added; give eager's layout=, too$"
    with pytest.raises(ValueError, match=needs):
        gp.prove(step, rewritten, topology=in_a_node)


def test_other_uses_added_are_not_autograds(simple: CapturedStep) -> None:
    eager = sharded()
    plan, layout = gp.BucketPlan.from_fully_shard(eager), gp.eager_layout(eager)
    rewritten = gp.default_pipeline(plan, expected_layout=layout).run(simple)
    total = next(
        node
        for node in calls(rewritten, torch.ops.aten.add.Tensor)
        if tuple(node.meta["val"].shape) == (10, 6) and len(node.all_input_nodes) == 2
    )
    total.args = (total.args[1], total.args[0])
    assert gp.prove(simple, rewritten, layout=layout)  # of two summands the order is none
    total.args = (total.args[0], total.args[0])
    with pytest.raises(ProofError, match="what is reduced is not autograd's sum of its uses, in order of arrival"):
        gp.prove(simple, rewritten, layout=layout)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((torch.ops.aten._to_copy.default, {"dtype": torch.bfloat16}), "dtype torch.bfloat16"),
        ((torch.ops.aten.slice.Tensor, {"dim": 0, "start": 0, "end": 1}), r"shape \(1, 6\)"),
        ((torch.ops.aten.view.default, {"size": [-1]}), r"shape \(12,\)"),
        ((torch.ops.aten.neg.default, {}), ""),  # and once more
    ],
)
def test_a_gradient_of_another_kind(simple: CapturedStep, change: tuple[Any, dict[str, Any]], reason: str) -> None:
    eager, (target, kwargs) = sharded(), change
    plan, layout = gp.BucketPlan.from_fully_shard(eager), gp.eager_layout(eager)
    step = gp.default_pipeline(plan, expected_layout=layout).run(simple)
    (slot,) = step.gradient_slots()["one.weight"]
    for _ in range(1 if reason else 2):
        gradient = step.output_values[slot]
        with step.graph.inserting_before(step.graph.output_node()):
            step.set_output(slot, step.emit(target, (gradient,), kwargs, like=gradient))
    if not reason:
        assert gp.prove(simple, step, layout=layout)
        return
    with pytest.raises(ProofError, match=f"changes the gradient of 'one.weight': it has .*{reason}"):
        gp.prove(simple, step, layout=layout)
