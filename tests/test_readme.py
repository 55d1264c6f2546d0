"""The README's examples run as they stand and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def block(marker: str) -> str:
    """Returns the code block behind ``<!-- marker -->``."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"README.md has no block marked {marker!r}"
    return found[1]


def run(*command: str, folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def without_times(text: str) -> list[str]:
    """Returns the lines of a report without the last column, which is milliseconds."""
    return [re.sub(r"\s+\d+\.\d$", "", line) for line in text.splitlines() if line.strip()]


@pytest.mark.multiprocess
def test_tied_example(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(block("example: tied.py"))
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "tied.py")
    assert without_times(run(*launch, folder=tmp_path)) == without_times(block("output: tied.py"))
    compare = (sys.executable, "-m", "graphpasses", "compare", "eager.jsonl", "captured.jsonl")
    printed = [line.rstrip() for line in run(*compare, folder=tmp_path).splitlines()]
    assert printed == block("output: compare").splitlines()[1:]


def test_dlrm_example(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "dlrm.py").write_text(block("example: dlrm.py"))
    printed = run(sys.executable, "dlrm.py", folder=tmp_path)
    assert without_times(printed) == without_times(block("output: dlrm.py"))


@pytest.mark.multiprocess
def test_towers_example(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "towers.py").write_text(block("example: towers.py"))
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "towers.py")
    assert run(*launch, folder=tmp_path) == block("output: towers.py")


def test_own_pass_example(tmp_path: Path) -> None:
    (tmp_path / "own_pass.py").write_text(block("example: own_pass.py"))
    printed = run(sys.executable, "-W", "error", "own_pass.py", folder=tmp_path)
    assert "remove-detach  bitwise   2" in printed


def test_my_model_example(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(block("example: my_model.py"))
    parity = ("graphpasses", "parity", "my_model.py", "--ranks", "24", "--gpus-per-node", "8", "--steps", "3")
    assert " ".join(parity) in README.read_text()
    printed = run(sys.executable, "-m", *parity, folder=tmp_path)
    assert [line.rstrip() for line in printed.splitlines()] == block("output: my_model.py").splitlines()
