"""Faults in training programs: what locate names of each kind, and that it names nothing where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.faults.__main__ import main
from experiments.faults.fault import Answer, Phase
from experiments.faults.run import FAULTS, HEALTHY, Found, judge, train_all

# Of each phase, and of what differs within, as few programs as can be.
ONE_RANK = (
    "another GELU",
    "a cast too many",
    "saved value overwritten",
    "NaN just before the loss",
    "loss rounded",
    "zero_grad forgotten",
    "trained parameter frozen",
    "zero_grad before the update",
    "another batch",
)
TWO_RANKS = ("gradient not reduced", "MAX for SUM", "gradients sent in bfloat16")
BY_NAME = {fault.name: fault for fault in FAULTS}


def found(names: tuple[str, ...], folder: Path) -> dict[str, Found]:
    faults = [BY_NAME[name] for name in names]
    train_all(faults, folder)
    return {each.name: each for each in judge(faults, folder)}


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return found(ONE_RANK, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return found(TWO_RANKS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", ONE_RANK)
def test_names_the_fault(name: str, of_one_rank: dict[str, Found]) -> None:
    assert of_one_rank[name].is_right, of_one_rank[name].text


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TWO_RANKS)
def test_names_the_fault_of_ranks(name: str, of_two_ranks: dict[str, Found]) -> None:
    assert of_two_ranks[name].is_right, of_two_ranks[name].text


def test_names_nothing_of_a_healthy_program(of_one_rank: dict[str, Found]) -> None:
    healthy = of_one_rank[f"{HEALTHY}: Training"]
    assert (healthy.expected, healthy.answer, healthy.text) == (None, None, "")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Answer("backward", "aten.gelu.default", "act"),
        Answer("forward", "aten.relu.default", "act"),
        Answer("forward", "aten.gelu.default", "norm"),
        Answer("forward", "aten.gelu.default", "act", (1,)),
    ],
)
def test_another_answer_is_wrong(answer: Answer | None) -> None:
    expected = Answer("forward", "aten.gelu.default", "act")
    assert Found("", expected, expected, "text").is_right
    assert not Found("", expected, answer, "text").is_right
    assert not Found("", None, expected, "text").is_right


def test_all_phases_are_tried() -> None:
    phases: set[Phase] = {fault.answer.phase for fault in FAULTS}
    assert phases == {"start", "forward", "loss", "backward", "gradients", "reduction", "optimizer"}
    assert len(BY_NAME) == len(FAULTS)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(only="another rate of") == 0
    assert "0 of 2 answers are wrong; " in capsys.readouterr().out
    wrong = replace(BY_NAME["another rate of dropout"], answer=Answer("loss", "aten.mul.Tensor"))
    monkeypatch.setattr("experiments.faults.__main__.FAULTS", (wrong,))
    assert main(only="another rate of") == 1
    assert "1 of 2 answers are wrong; " in capsys.readouterr().out
    assert main(only="no such fault") == 2
