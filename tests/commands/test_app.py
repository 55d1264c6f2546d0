"""The command line: exit codes, what goes to which stream, and that nothing is cut in a pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphpasses.commands import app
from graphpasses.parity.run_file import Loss, RunHeader, StepRecord, end_line, header_line, step_line

NAME = "layers.0.attention." + "very_long_name." * 20 + "weight"


def write(path: Path, digest: str, *, loss: str = "3f800000", num_tensors: int = 1, torch: str = "2.13.0") -> str:
    weights = {f"{NAME}{index}": digest for index in range(num_tensors)}
    record = StepRecord(0, Loss("float32", (loss,), ("1.0",)), weights, {})
    path.write_bytes(header_line(RunHeader(torch, 1, run="eager [fp32]")) + step_line(record) + end_line(1))
    return str(path)


@pytest.fixture
def a(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", "0" * 32)


def test_equal_runs_exit_with_0(a: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", a, a]) == 0
    out, err = capsys.readouterr()
    assert "equal: all 1 common steps, bit for bit" in out
    assert "eager [fp32]" in out  # not taken for markup
    assert err == ""


def test_different_runs_exit_with_1(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", a, write(tmp_path / "b.jsonl", "1" * 32)]) == 1
    out, err = capsys.readouterr()
    assert "first difference in step 0: the weights" in out
    assert f"{NAME}0" in out  # in one piece: a pipe has no width
    assert err == ""


def test_a_run_that_was_killed_exits_with_2(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = tmp_path / "killed.jsonl"
    killed.write_bytes(Path(a).read_bytes().replace(end_line(1), b""))
    assert app.main(["compare", a, str(killed)]) == 2
    out, _ = capsys.readouterr()
    assert "not compared whole: what both runs have of 1 steps is equal, bit for bit" in out
    assert "not compared: run B was cut short: it has 1 steps, 0 to 0" in out
    assert "to compare in spite of that: --allow steps" in out
    assert app.main(["compare", a, str(killed), "--allow", "steps"]) == 0
    assert "note: run B was cut short: it has 1 steps, 0 to 0" in capsys.readouterr().out
    assert app.main(["compare", a, str(killed), "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["equal"], data["b"]["complete"]) == ("not compared", False, False)


@pytest.mark.parametrize("command", ["--help", "compare {a} {a}"])
def test_a_reader_that_has_gone(a: str, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        found = subprocess.run(
            [sys.executable, "-m", "graphpasses", *command.format(a=a).split()],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (found.returncode, found.stderr) == (141, "")


def test_another_broken_pipe_is_trouble(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> int:
        raise BrokenPipeError("of a rank")

    monkeypatch.setattr(app.app, "cli", fail)
    assert app.main([]) == 2
    assert capfd.readouterr().err.endswith("BrokenPipeError: of a rank\n")


def test_losses_are_shown(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", a, write(tmp_path / "b.jsonl", "0" * 32, loss="3f800001")]) == 1
    out, _ = capsys.readouterr()
    assert "first difference in step 0: the loss" in out
    assert "3f800001" in out


def test_json(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", a, write(tmp_path / "b.jsonl", "1" * 32), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["equal"], data["divergence"]["weights"]) == (False, [f"{NAME}0"])
    assert app.main(["compare", a, a, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["divergence"] is None


def test_max_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / f"{digit}.jsonl", digit * 32, num_tensors=30) for digit in "01"]
    assert app.main(["compare", *runs]) == 1
    assert "and 10 more tensors" in capsys.readouterr().out
    assert app.main(["compare", *runs, "--max-tensors", "3"]) == 1
    assert "and 27 more tensors" in capsys.readouterr().out
    assert app.main(["compare", *runs, "--max-tensors", "-1"]) == 2
    assert capsys.readouterr().err == "graphpasses: --max-tensors is -1; it cannot be negative\n"


def test_what_cannot_be_compared_exits_with_2(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", a, f"{tmp_path}/no.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"graphpasses: cannot read '{tmp_path}/no.jsonl': No such file or directory\n"
    assert app.main(["compare", a, write(tmp_path / "b.jsonl", "0" * 32, torch="2.12.0")]) == 2
    assert capsys.readouterr().err.startswith("graphpasses: the runs used torch 2.13.0 and torch 2.12.0: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing subcommand"),
        (["compaer"], "Unrecognized options: compaer"),
        (["compare", "a"], "RUN_B"),
        (["compare", "a", "b", "c"], "Unrecognized options: c"),
        (["compare", "a", "b", "--max-tensors", "many"], "many"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_an_unexpected_error_does_not_look_like_a_difference(
    a: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("graphpasses.parity.compare.compare_runs", lambda a, b, allow: 1 / 0)
    assert app.main(["compare", a, a]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_tells_exit_codes_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 the runs recorded the same things for the same steps" in out
    assert "Example: graphpasses compare eager.jsonl compiled.jsonl" in out


def test_as_a_process(a: str, tmp_path: Path) -> None:
    """The exit code reaches the shell, and nothing heavy is imported."""
    b = write(tmp_path / "b.jsonl", "1" * 32)
    heavy = "sorted({'torch', 'torchtitan', 'torchrec', 'fbgemm_gpu'} & {*sys.modules})"
    code = (
        f"import atexit, runpy, sys; sys.argv = ['graphpasses', 'compare', {a!r}, {b!r}]; "
        f"atexit.register(lambda: print({heavy})); runpy.run_module('graphpasses', run_name='__main__')"
    )
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"
