"""Examples of the README and of docs/ run as they stand and print what is shown below them.

In a page, a code block after ``<!-- example: FILE -->`` is written to that file. A block after ``<!-- output -->``
begins with ``$ COMMAND``; the command must print the rest of the block. ``EXPECTTEST_ACCEPT=1`` writes what it
printed into the page. The quickstart's command, and one of torchrun, are started as a reader starts them; others are
forked from a process that has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from graphpasses._torch.tested_versions import RELEASE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES_TORCH = (2, 13)
BLOCK = re.compile(r"<!-- (example: (?P<file>\S+)|output) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text())
]
FIRST_PAGE = ROOT / "docs" / "quickstart.md"
TORCHRUN_ITSELF = "torchrun --nproc-per-node 2 microbatches.py"
RUNNERS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "graphpasses": ("-m", "graphpasses"),
    "python": (),
}


def is_strict(name: str, arguments: Sequence[str], folder: Path) -> bool:
    """Whether a command must not warn: a script that imports torch alone."""
    return name == "python" and "torchrec" not in (folder / arguments[0]).read_text()


def run(command: str, folder: Path) -> str:
    """Returns what a command prints."""
    name, *arguments = shlex.split(command)
    strict = is_strict(name, arguments, folder)
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


def run_forked(command: str, folder: Path) -> str:
    """Returns what a command prints, each of whose processes is forked from one that has imported torch."""
    name, *arguments = shlex.split(command)
    strict, num_ranks = is_strict(name, arguments, folder), 1
    if name == "torchrun":
        option, num, *arguments = arguments
        assert option == "--nproc-per-node"
        num_ranks = int(num)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"COLUMNS": "120", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    shared |= {"WORLD_SIZE": str(num_ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    envs = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    outputs = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(num_ranks)]
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=play, args=(name, arguments, folder, env, paths, strict))
        for env, paths in zip(envs, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()  # nothing, if it has ended
    for process, (_, errors) in zip(processes, outputs, strict=True):
        process.join()
        assert process.exitcode == 0, f"{command}:\n{errors.read_text()}"
    return "".join(out.read_text() for out, _ in outputs)


def play(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    env: dict[str, str],
    outputs: tuple[Path, Path],
    strict: bool,
) -> None:
    """Makes this process that of a command."""
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        stream.flush()
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(env)
    os.chdir(folder)
    if strict:
        warnings.simplefilter("error")
    if name == "graphpasses":
        sys.argv = [name, *arguments]
        runpy.run_module("graphpasses", run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(folder))
        runpy.run_path(arguments[0], run_name="__main__")


def comparable(text: str) -> list[str]:
    """Returns the lines of a report without the last column, milliseconds.

    With another torch than the pages' also without how many nodes there are, and how many values the proof follows.
    """
    lines = [re.sub(r"\s+\d+\.\d$", "", line.rstrip()) for line in text.splitlines() if line.strip()]
    if RELEASE == PAGES_TORCH:
        return lines
    return [re.sub(r"\d+" if "proved" in line else r"\d+ → \d+(?=  )", "n", line) for line in lines]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[] if page == FIRST_PAGE else [pytest.mark.multiprocess],
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
        is_forked = page != FIRST_PAGE and command != TORCHRUN_ITSELF
        printed = (run_forked if is_forked else run)(command, tmp_path)
        if os.environ.get("EXPECTTEST_ACCEPT"):
            lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines() if line.strip())
            page.write_text(page.read_text().replace(block["text"], f"{first}\n{lines}"))
        else:
            assert comparable(printed) == comparable(expected)
    assert not unused, f"{page.name} shows no output of {unused}"
