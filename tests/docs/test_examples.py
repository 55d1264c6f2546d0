"""Examples of the README and of docs/ run as they stand and print what is shown below them.

In a page, a code block after ``<!-- example: FILE -->`` is written to that file. A block after ``<!-- output -->``
begins with ``$ COMMAND``; the command must print the rest of the block. ``EXPECTTEST_ACCEPT=1`` writes what it
printed into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES_TORCH = "2.13."
BLOCK = re.compile(r"<!-- (example: (?P<file>\S+)|output) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text())
]
RUNNERS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "graphpasses": ("-m", "graphpasses"),
    "python": (),
}


def run(command: str, folder: Path) -> str:
    """Returns what a command prints; an example that imports torch alone must not warn."""
    name, *arguments = shlex.split(command)
    strict = name == "python" and "torchrec" not in (folder / arguments[0]).read_text()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    result = subprocess.run(
        [sys.executable, *(["-W", "error"] if strict else []), *RUNNERS[name], *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command}:\n{result.stderr}"
    return result.stdout


def comparable(text: str) -> list[str]:
    """Returns the lines of a report without the last column, milliseconds.

    With another torch than the pages' also without how many nodes there are, and how many values the proof follows.
    """
    lines = [re.sub(r"\s+\d+\.\d$", "", line.rstrip()) for line in text.splitlines() if line.strip()]
    if torch.__version__.startswith(PAGES_TORCH):
        return lines
    return [re.sub(r"\d+" if "proved" in line else r"\d+ → \d+(?=  )", "n", line) for line in lines]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[pytest.mark.multiprocess] if "$ torchrun" in page.read_text() else [],
            id=str(page.relative_to(ROOT)),
        )
        for page in PAGES
    ],
)
def test_examples_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if "import torchrec" in text or "from torchrec" in text:
        pytest.importorskip("torchrec")
    unused: set[str] = set()
    for block in BLOCK.finditer(text):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
            unused.add(block["file"])
            continue
        first, _, expected = block["text"].partition("\n")
        command = first.removeprefix("$ ")
        assert command != first, f"{page.name}: an output begins with $ and the command, got {first!r}"
        unused -= set(shlex.split(command))
        printed = run(command, tmp_path)
        if os.environ.get("EXPECTTEST_ACCEPT"):
            lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines() if line.strip())
            page.write_text(page.read_text().replace(block["text"], f"{first}\n{lines}"))
        else:
            assert comparable(printed) == comparable(expected)
    assert not unused, f"{page.name} shows no output of {unused}"
