"""Mutants: every kind is made, what a run tells of one, and what the command says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from experiments.mutants import __main__ as command
from experiments.mutants import judge as judging
from experiments.mutants.edits import Copy, Edit
from experiments.mutants.graphs import SOURCES, Pair
from experiments.mutants.judge import KINDS, Judged, complaints, judge, mutants_of
from experiments.mutants.running import run
from graphpasses.graph import WAIT, Stage, argument, find_collectives

pytestmark = pytest.mark.slow

aten = torch.ops.aten
BY_NAME = {source.name: source for source in SOURCES}
HYBRID, RANDOM = "FSDP2, HSDP, a layer twice", "FSDP2, recomputed dropout"


@pytest.fixture
def hybrid() -> Iterator[Pair]:
    with BY_NAME[HYBRID].pairs() as (pair,):
        yield pair


@pytest.fixture
def judged_edit(hybrid: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judged]:
    """Judges one edit of the rewritten step."""

    def judge_edit(apply: Callable[[Copy], object], rank: int | None = None) -> Judged:
        edit = Edit("wait", "as the test says", apply, rank)
        monkeypatch.setattr(judging, "edits_of", lambda _: {"wait": [edit]})
        (judged,) = judge(hybrid, "step", hybrid.after, 1)
        return judged

    return judge_edit


def test_graphs_of_all_stages() -> None:
    with BY_NAME[HYBRID].pairs() as (pair,):
        assert list(pair.graphs) == [f"{HYBRID}, captured", f"{HYBRID}, rewritten"]
        assert pair.after.stage is Stage.STEP
    with BY_NAME["torch.compile, BatchNorm"].pairs() as pairs:
        assert [pair.before.stage for pair in pairs] == [*Stage][1:]
        assert [len(pair.graphs) for pair in pairs] == [1, 1, 1, 1]  # the passes change none of them


def test_correct_passes_leave_the_same_bits(hybrid: Pair) -> None:
    outcomes = [
        run([graph] * 4, hybrid.inputs, hybrid.cluster, is_late=is_late)
        for graph in (hybrid.before, hybrid.after)
        for is_late in (False, True)
    ]
    assert outcomes[0].bits
    assert [outcome.bits == outcomes[0].bits for outcome in outcomes] == [True] * 4
    assert complaints(hybrid) == {}


def test_same_and_other_bits(hybrid: Pair, judged_edit: Callable[..., Judged]) -> None:
    loss = hybrid.after.output_values[0]
    for factor, result, verdict in ((1.0, "same bits", ""), (0.5, "other bits", "changes the loss")):

        def scale(copy: Copy, factor: float = factor) -> None:
            copy.graph.set_output(0, copy.after(copy[loss], aten.mul.Tensor, copy[loss], factor))

        judged = judged_edit(scale)
        assert judged.result == result
        assert not judged.verdicts["verify"].rejected
        rejected = judged.verdicts["prove"].rejected
        assert verdict in rejected if verdict else not rejected
        assert not judged.is_missed


def test_what_is_not_waited_for_is_not_there(hybrid: Pair, judged_edit: Callable[..., Judged]) -> None:
    wait = hybrid.after.graph.find_nodes(op="call_function", target=WAIT)[0]

    def drop(copy: Copy) -> None:
        copy[wait].replace_all_uses_with(argument(copy[wait]))
        copy.graph.graph.erase_node(copy[wait])

    judged = judged_edit(drop)
    assert judged.result == "other bits"
    assert judged.verdicts["verify"].rejected.startswith("pass 'wrong' left collective all_gather_into_tensor")
    assert not judged.is_missed


def test_ranks_that_differ_hang(hybrid: Pair, judged_edit: Callable[..., Judged]) -> None:
    first = next(node for node in hybrid.after.graph.nodes if node in find_collectives(hybrid.after.graph))
    others = [node for node in find_collectives(hybrid.after.graph) if node.target is not first.target]
    last = max(others)

    def leave_out(copy: Copy) -> None:
        wait = next(user for user in copy[last].users if user.target is WAIT)
        wait.replace_all_uses_with(argument(copy[last]))
        copy.graph.graph.erase_node(wait)
        copy.graph.graph.erase_node(copy[last])

    judged = judged_edit(leave_out, rank=-1)
    assert judged.result == "hangs"
    assert judged.is_rejected


def test_every_kind_is_made() -> None:
    kinds: set[str] = set()
    for name in (HYBRID, RANDOM):
        with BY_NAME[name].pairs() as (pair,):
            kinds |= {edit.kind for edit, _ in mutants_of(name, pair.after, 1)}
    assert kinds == {*KINDS}


def test_mutants_are_the_same_each_time(hybrid: Pair) -> None:
    made = [[edit.text for edit, _ in mutants_of("step", hybrid.after, 2)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(made[0]) > 20


@pytest.mark.parametrize("name", [HYBRID, "torch.compile, BatchNorm"])
def test_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(num_of_a_kind=1, only=name) == 0
    out = capsys.readouterr().out
    assert all(f"│ {kind} " in out for kind in KINDS)
    assert "; correct pipelines: 0 refused, 0 not proved; " in out


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(only="lstm") == 2
    assert capsys.readouterr().err.startswith("no case contains 'lstm'; there are: FSDP2, tied, ")
