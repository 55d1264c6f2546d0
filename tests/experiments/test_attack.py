"""The attack: its corpus, what it says of a proof that is wrong, and what the command prints."""

from __future__ import annotations

import random

import pytest

from experiments.attack import __main__ as command
from experiments.attack import judge
from experiments.attack.case import Case, shrink
from experiments.attack.corpus import CORPUS, OPEN
from experiments.attack.program import random_program
from experiments.attack.right_rewrites import judge_right_rewrites
from graphpasses.graph.certificate import Certificate


def params() -> list[object]:
    marks = {case: pytest.mark.xfail(strict=True, reason=reason) for case, reason in OPEN.items()}
    return [pytest.param(case, marks=marks.get(case, ())) for case in CORPUS]


@pytest.mark.parametrize("case", params(), ids=lambda case: case.rewrites[-1])
def test_corpus(case: Case) -> None:
    answers = [finding.answer for _, _, finding in case.findings()]
    assert answers  # the rewrite is still made
    assert not {"unsound", "false refusal", "fails"} & {*answers}


def test_a_proof_that_believes_everything_is_told_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "prove", lambda *_: Certificate((), (), {}, (), 0.0))
    lines = ("a0 = self.b.exp()", "a1 = x + 1", "self.k0[:16].copy_(a0)", "return self.u.sum()")
    wrong = Case(lines, ("identity: aten.exp.default: abs(x)", "identity: aten.exp.default: mul.Tensor(x, 1.0)"))
    assert wrong.disagreement() is None  # exp is not negative
    wrong = Case(lines, ("operator: aten.exp.default is aten.neg.default", wrong.rewrites[1]))
    shrunk = shrink(wrong, "unsound")
    assert shrunk == Case((lines[0], *lines[2:]), wrong.rewrites[:1])
    script = shrunk.script()
    assert script.startswith("# unsound\n# buffer k0, step 0 of rank 0, normal inputs\n# -    %exp")
    assert "#         a0 = self.b.exp()\n" in script
    assert eval(script.partition("CASE = ")[2].partition("\n")[0]) == shrunk


def test_programs_are_the_same_each_time() -> None:
    one, two = (random_program(random.Random(3), 6) for _ in range(2))
    assert one == two != random_program(random.Random(4), 6)


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    outs = []
    for _ in range(2):
        command.main(num_graphs=1, num_shrunk=0)
        outs.append(capsys.readouterr().out.rpartition(";")[0])
    assert outs[0] == outs[1]
    assert "│ identity " in outs[0]
    assert " of 1 programs, 0 not captured: " in outs[0]


@pytest.mark.slow
def test_right_rewrites() -> None:
    answers = [finding.answer for _, finding in judge_right_rewrites()]
    assert len(answers) == 60
    assert not {"refused", "unsound", "raises"} & {*answers}  # all are right, as runs say
    assert "false refusal" not in answers
    assert answers.count("proved") >= 50
