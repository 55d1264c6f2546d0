"""Random programs keep eager's bits, and a step that does not is told and shrunk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.harness.outcome import Outcome, Outcomes
from experiments.random_programs import running
from experiments.random_programs.loop import Loop
from experiments.random_programs.program import BrokenProgram, Program
from experiments.random_programs.running import judge, judged, repair, shrunk
from graphpasses.parity.launch import run_ranks
from graphpasses.state.left_tensors import Left

NOTING = """
import torch
from torch import nn
class Model(nn.Linear):
    def forward(s, x):
        s.last = len(x)
        h = super().forward(x)
        h1 = h + missing
        return h1
def loss_fn(model, x, y, k):
    return model(x).square().mean()
def run(c):
    torch.manual_seed(0)
    model = Model(8, 8)
    opt = torch.optim.SGD(model.parameters())
    step = c.step(loss_fn, model)
    for i in range(3):
        x, y = c.floats(i), c.integers(i)
        loss = step(x, y, 1.0)
        opt.step()
        c.record(loss=loss, model=model, opt=opt, x=x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 8, 11])
def test_bits(seed: int, tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(Program(seed).source())
    assert not repair(path)
    assert {outcome.kind for outcome in judged(path, ("captured",)).values()} <= {"bits", "refused"}


@pytest.mark.slow
def test_a_defect_is_told_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "program.py").write_text(NOTING.replace("h + missing", "h.tanh()"))
    assert judged(path, ("captured",))["captured"].kind == "bits"
    monkeypatch.setattr(Left, "leave", lambda *_: None)
    nothing = SimpleNamespace(changed=dict)
    monkeypatch.setattr("graphpasses.capture.oracle.LeftTensors", lambda _: nothing)
    outcome = judged(path, ("captured",))["captured"]
    assert outcome.kind == "differs"
    assert outcome.detail.endswith("then ['in_features', 'out_features', 'training']")
    lines = shrunk(path, "captured", "differs")
    assert "        s.last = len(x)" in lines
    assert "        opt.step()" not in lines


def test_lines_at_which_eager_fails_go(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(NOTING)
    assert running.trained(path, "eager")[1].endswith("NameError: name 'missing' is not defined\n")
    assert not repair(path)
    assert "        h1 = h + 0" in path.read_text()


@pytest.mark.slow
def test_bits_over_broken_graphs(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(BrokenProgram(101).source())
    assert "torch._dynamo.graph_break()" in path.read_text()
    assert not repair(path)
    assert judged(path, ("compiled",)) == {"compiled": Outcome("bits")}


def test_a_seed_decides_the_program() -> None:
    assert Program(1).source() == Program(1).source() != Program(2).source()


def test_bits_of_a_loop_and_its_control_differs(tmp_path: Path) -> None:
    (path := tmp_path / "loop.py").write_text(Loop(90003).source())
    assert not repair(path)
    assert judged(path, ("captured", "pipeline")) == dict.fromkeys(("captured", "pipeline"), Outcome("bits"))
    path.write_text(path.read_text().replace("set_to_none=False", "set_to_none=c.way == 'captured'"))
    assert judged(path, ("captured",))["captured"].kind == "differs"


@pytest.mark.multiprocess
def test_bits_of_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    assert "        fully_shard(model, " in Program(500006).source()
    outcomes = Outcomes(tmp_path / "outcomes.jsonl")
    run_ranks(judge, 2, 500006, tmp_path, outcomes)
    assert {name: outcome.kind for name, outcome in outcomes.read().items()} == {
        "500006 captured": "bits",
        "500006 pipeline": "bits",
    }
