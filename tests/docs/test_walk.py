"""CONTRIBUTING.md's walk "add a pass", followed in a fresh copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"<!-- (?P<verb>file|edit|append|run)(: (?P<path>\S+))? -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
FOLDERS = ("graphpasses", "tests", "docs")
FILES = ("conftest.py", "pyproject.toml", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def edit(path: Path, diff: str) -> None:
    """Adds the lines that begin with ``+`` after the line before them."""
    lines = path.read_text().splitlines()
    for line in diff.splitlines():
        if line.startswith(" "):
            assert lines.count(line[1:]) == 1, f"{path.name} has {lines.count(line[1:])} lines {line[1:]!r}"
            place = lines.index(line[1:])
        else:
            place += 1
            lines.insert(place, line[1:])
    path.write_text("\n".join(lines) + "\n")


def run(command: str, folder: Path) -> None:
    *settings, python, rest = re.split(r" ?\b(python) ", command, maxsplit=1)
    assert python == "python"
    env = {**os.environ, "PYTHONPATH": str(folder), "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    env |= dict(setting.split("=") for setting in settings if setting)
    result = subprocess.run(
        [sys.executable, *rest.split()], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"


def test_add_a_pass(tmp_path: Path) -> None:
    for folder in FOLDERS:
        # With what is compiled, but for what is being written.
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path)
    steps = list(STEP.finditer((ROOT / "CONTRIBUTING.md").read_text()))
    assert steps
    for step in steps:
        path = tmp_path / (step["path"] or "")
        if step["verb"] == "file":
            path.write_text(step["text"])
        elif step["verb"] == "append":
            path.write_text(path.read_text() + "\n\n" + step["text"])
        elif step["verb"] == "edit":
            edit(path, step["text"])
        else:
            for line in step["text"].splitlines():
                run(line.removeprefix("$ "), tmp_path)
    written = (tmp_path / "graphpasses/passes/fsdp/remove_detach.py").read_text()
    assert "grad = aten.mul(y, weight)  # f32[4]" in written
    assert written.count("saved = aten.detach(y)") == 1
