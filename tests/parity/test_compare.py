"""Comparisons of runs written by hand: what differs first, what cannot be compared, and how it reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpasses.errors import CompareError
from graphpasses.fsdp.layout import BucketLayout, Layout, LayoutEntry
from graphpasses.fsdp.layout_diff import Move, Place
from graphpasses.parity import Loss, Run, RunHeader, StepRecord, compare_runs
from graphpasses.parity.compare import GAP_KINDS, Gap, GapKind, StepDifference, step_differences
from graphpasses.parity.report import comparison_to_json, meaning

HEADER = RunHeader(torch="2.13.0", world_size=2, run="eager", seed=0, topology={"nodes": 1})


def layout(*fqns: str) -> Layout:
    entries = tuple(LayoutEntry(fqn, 4, 2, 4 * index) for index, fqn in enumerate(fqns))
    return Layout((BucketLayout("reduce_scatter", (0, 1), "avg", "bfloat16", entries),))


def step(number: int, **changes: Any) -> StepRecord:
    """A step whose record depends on its number alone, but for the changes."""
    record = StepRecord(
        number,
        Loss("float32", ("3f800000", f"{number:08x}"), ("1.0", repr(float(number)))),
        {name: f"{name} weight {number}" for name in ("a", "b", "frozen")},
        {"a": f"a gradient {number}", "b": f"b gradient {number}", "frozen": None},
    )
    return replace(record, **changes)


def run_of(*steps: StepRecord, complete: bool = True, **header: Any) -> Run:
    return Run(Path("run.jsonl"), replace(HEADER, **header), steps, complete)


STEPS = (step(0), step(1), step(2))
OTHER_LOSS = Loss("float32", ("3f800000", "ffffffff"), ("1.0", "nan"))
OTHER_GRADIENTS = {"a": "other", "b": "b gradient 1", "frozen": None}
OTHER_WEIGHTS = {"a": "a weight 1", "b": "other", "frozen": "frozen weight 1"}

OTHER_TORCH = (
    "the runs used torch 2.13.0 and torch 2.14.0: bits are only comparable on one version; record both on the same"
)

OTHER_WEIGHT_NAMES = (
    "the runs have other weights in step 0: only A has 'a', 'frozen'; only B has 'c', 'd', 'e' and 2 more"
)


def test_equal_runs() -> None:
    comparison = compare_runs(run_of(*STEPS), run_of(*STEPS, run="compiled"))
    assert comparison.equal
    assert comparison.num_steps == 3
    assert comparison.notes == ()


@pytest.mark.parametrize(
    ("changes", "first", "gradients", "weights"),
    [
        ({"loss": OTHER_LOSS}, "loss", (), ()),
        ({"gradients": OTHER_GRADIENTS}, "gradients", ("a",), ()),
        ({"weights": OTHER_WEIGHTS}, "weights", (), ("b",)),
        ({"weights": OTHER_WEIGHTS, "gradients": OTHER_GRADIENTS}, "gradients", ("a",), ("b",)),
        ({"weights": OTHER_WEIGHTS, "loss": OTHER_LOSS}, "loss", (), ("b",)),
        ({"gradients": {"a": None, "b": "b gradient 1", "frozen": None}}, "gradients", ("a",), ()),
    ],
)
def test_first_divergence(
    changes: dict[str, Any], first: str, gradients: tuple[str, ...], weights: tuple[str, ...]
) -> None:
    later = step(2, loss=OTHER_LOSS)
    comparison = compare_runs(run_of(*STEPS), run_of(step(0), step(1, **changes), later))
    divergence = comparison.divergence
    assert divergence is not None
    assert (divergence.step, divergence.first) == (1, first)
    assert (divergence.gradients, divergence.weights) == (gradients, weights)
    assert divergence.loss == ("loss" in changes)
    assert divergence.moves == ()


def test_moves_are_shown_for_what_differs() -> None:
    changed = (step(0), step(1, gradients=OTHER_GRADIENTS))
    a, b = run_of(*STEPS, layouts=layout("a", "b", "c")), run_of(*changed, layouts=layout("b", "a", "c"))
    divergence = compare_runs(a, b).divergence
    assert divergence is not None
    place = Place(
        "reduce_scatter",
        (0, 1),
        "avg",
        "bfloat16",
        0,
        2,
        num_bytes=12,
        shard_dim=0,
        members="a\nb\nc",
        bucket=0,
    )
    assert divergence.moves == (Move("a", place, replace(place, offset=4)),)
    numbers = {"offset": 0, "padded_numel": 2, "num_bytes": 12, "num_ranks": 2}
    there = {"collective": "reduce_scatter", "op": "avg", "dtype": "bfloat16", **numbers}
    data = comparison_to_json(compare_runs(a, b))["divergence"]
    assert data["moves"] == [{"fqn": "a", "a": [there], "b": [{**there, "offset": 4}]}]
    gone = compare_runs(a, run_of(*changed, layouts=layout("b"))).divergence
    assert gone is not None
    assert gone.moves == (Move("a", place, None),)


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        (
            run_of(*STEPS, torch="2.14.0"),
            OTHER_TORCH,
        ),
        (run_of(*STEPS, seed=1), "the runs began with seeds 0 and 1: record both with one"),
        (run_of(step(7)), "the runs have no step in common: A has 3 steps, 0 to 2, B has 1 steps, 7 to 7"),
        (
            run_of(complete=False),
            "the runs have no step in common: A has 3 steps, 0 to 2, B has no steps",
        ),
        (
            run_of(step(0, loss=None, weights={"z": ""}, gradients={})),
            "step 0 has neither losses of as many ranks nor gradients nor weights that both runs recorded",
        ),
    ],
)
def test_what_cannot_be_compared(b: Run, reason: str) -> None:
    with pytest.raises(CompareError) as error:
        compare_runs(run_of(*STEPS), b)
    assert str(error.value) == reason


NO_GRADIENTS = {"a": None, "b": None, "frozen": None}


@pytest.mark.parametrize(
    ("kind", "b", "text"),
    [
        ("torch", run_of(*STEPS, torch="2.14.0"), OTHER_TORCH),
        ("seed", run_of(*STEPS, seed=1), "the runs began with seeds 0 and 1: record both with one"),
        ("model", run_of(*STEPS, model="gpt"), "the runs are of models '' and 'gpt'"),
        (
            "ranks",
            run_of(*STEPS, world_size=8),
            "the runs have 2 and 8 ranks: each rank's loss is not compared, weights and gradients are",
        ),
        (
            "topology",
            run_of(*STEPS, topology={"nodes": 2}),
            "the runs' clusters differ (nodes: 1 and 2): sums may be others",
        ),
        (
            "topology",
            run_of(*STEPS, topology="2 x DGX"),
            "the runs' clusters differ (nodes: 1 and None; cluster: None and 2 x DGX): sums may be others",
        ),
        ("steps", run_of(*STEPS, complete=False), "run B was cut short: it has 3 steps, 0 to 2"),
        ("steps", run_of(*STEPS[:2]), "1 steps of run A are not in the other"),
        ("steps", run_of(*STEPS, step(3), step(4)), "2 steps of run B are not in the other"),
        (
            "tensors",
            run_of(step(0, weights={name: f"{name} weight 0" for name in "bcdefg"}), *STEPS[1:]),
            OTHER_WEIGHT_NAMES,
        ),
        (
            "tensors",
            run_of(*STEPS[:2], step(2, gradients={"a": "a gradient 2", "b": "b gradient 2"})),
            "the runs have other gradients in step 2: only A has 'frozen'",
        ),
        (
            "gradients",
            run_of(*STEPS[:1], step(1, gradients=NO_GRADIENTS), STEPS[2]),
            "only run A has gradients, first in step 1",
        ),
        ("losses", run_of(*STEPS[:2], step(2, loss=None)), "only run A has losses, first in step 2"),
    ],
)
def test_runs_that_recorded_other_things_are_not_equal(kind: GapKind, b: Run, text: str) -> None:
    a = run_of(*STEPS)
    others = [each for each in GAP_KINDS if each != kind]
    if kind in ("torch", "seed"):
        with pytest.raises(CompareError) as error:
            compare_runs(a, b, allow=others)
        assert str(error.value) == text
    else:
        found = compare_runs(a, b, allow=others)
        assert (found.verdict, found.divergence, found.gaps) == ("not compared", None, (Gap(kind, text),))
        assert compare_runs(b, a, allow=others).verdict == "not compared"
    allowed = compare_runs(a, b, allow=[kind])
    assert (allowed.verdict, allowed.gaps, allowed.notes) == ("equal", (), (text,))


def test_what_both_have_is_compared_beside_gaps() -> None:
    b = run_of(step(0, weights={"a": "a weight 0", "b": "other"}, gradients=NO_GRADIENTS), complete=False)
    found = compare_runs(run_of(*STEPS), b)
    assert found.verdict == "different"
    assert found.divergence is not None
    assert (found.divergence.gradients, found.divergence.weights) == (None, ("b",))
    assert [gap.kind for gap in found.gaps] == ["steps", "steps", "tensors", "gradients"]


def test_what_can_be_allowed() -> None:
    with pytest.raises(CompareError) as error:
        compare_runs(run_of(*STEPS), run_of(*STEPS), allow=["step"])
    assert str(error.value) == (
        "cannot allow 'step'; allow 'torch', 'seed', 'model', 'ranks', 'topology', 'steps', 'tensors', 'losses', "
        "'gradients'; "
        "did you mean 'steps'?"
    )


def test_a_run_that_was_cut_short_is_not_equal_but_may_differ() -> None:
    verdicts = [
        compare_runs(*runs).verdict
        for runs in (
            (run_of(*STEPS), run_of(*STEPS)),
            (run_of(*STEPS), run_of(*STEPS, complete=False)),
            (run_of(*STEPS, complete=False), run_of(*STEPS)),
            (run_of(*STEPS), run_of(step(0, weights=OTHER_WEIGHTS), complete=False)),
        )
    ]
    assert verdicts == ["equal", "not compared", "not compared", "different"]


def test_losses_alone_of_other_world_sizes_are_not_called_equal() -> None:
    """Nothing of them is compared, whatever is allowed."""
    alone = replace(step(0), weights={}, gradients={})
    allow: list[GapKind] = ["ranks"]
    assert compare_runs(run_of(alone), run_of(alone), allow=allow).equal
    other = Loss("float32", ("00000000",), ("0.0",))
    with pytest.raises(CompareError, match="step 0 has neither losses of as many ranks nor gradients"):
        compare_runs(run_of(alone), run_of(replace(alone, loss=other), world_size=1), allow=allow)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"weights": {**STEPS[0].weights, "mean": "other"}},
            "losses and gradients are equal: no parameter differs, but buffers or the optimizer's state",
        ),
        (
            {"weights": {**STEPS[0].weights, "mean": "", "a": "other"}},
            "losses and gradients are equal: the optimizer step differs, or the weights it began with",
        ),
        ({"loss": replace(OTHER_LOSS, dtype="float64")}, "the losses are of float32 and float64: record both in one"),
    ],
)
def test_the_cause(changes: dict[str, Any], text: str) -> None:
    a = step(0, weights={**STEPS[0].weights, "mean": ""})
    divergence = compare_runs(run_of(a), run_of(replace(a, **changes))).divergence
    assert divergence is not None
    assert meaning(divergence) == text


def test_losses_of_other_world_sizes_are_not_compared() -> None:
    b = run_of(step(0, loss=OTHER_LOSS), step(1, gradients=OTHER_GRADIENTS), world_size=8)
    comparison = compare_runs(run_of(*STEPS), b)
    assert comparison.divergence is not None
    assert (comparison.divergence.step, comparison.divergence.loss) == (1, None)
    assert [gap.kind for gap in comparison.gaps] == ["ranks", "steps"]


def test_json_is_complete() -> None:
    comparison = compare_runs(run_of(*STEPS), run_of(step(0, weights={**STEPS[0].weights, "b": "x"})))
    data = json.loads(json.dumps(comparison_to_json(comparison)))
    assert data["equal"] is False
    assert data["divergence"]["first"] == "weights"
    assert data["divergence"]["weights"] == ["b"]
    assert data["a"]["torch"] == "2.13.0"
    assert data["gaps"] == [{"kind": "steps", "text": "2 steps of run A are not in the other"}]
    assert data["notes"] == []


def test_every_step_has_its_differences() -> None:
    b = run_of(step(0), step(1, weights=OTHER_WEIGHTS, loss=OTHER_LOSS), step(2), step(3))
    assert step_differences(run_of(*STEPS, step(4)), b) == [
        StepDifference(0, False, (), ()),
        StepDifference(1, True, (), ("b",)),
        StepDifference(2, False, (), ()),
    ]
    with pytest.raises(CompareError, match="the runs have no step in common"):
        step_differences(run_of(step(0)), run_of(step(1)))
