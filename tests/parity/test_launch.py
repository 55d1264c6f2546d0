"""Ranks end with their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch.distributed as dist

from graphpasses.parity.launch import run_ranks


def train(folder):
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    if sys.argv[2] == "fail" and dist.get_rank() == 0:
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        raise ValueError("no kernel")
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    run_ranks(train, 2, sys.argv[1], preload=("torch",))
"""


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False


def wait_until(what: str, condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("end", [signal.SIGKILL, "fail"])
@pytest.mark.multiprocess
def test_ranks_end_with_their_caller(tmp_path: Path, end: signal.Signals | str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(SCRIPT)
    folder.mkdir()
    caller = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(end)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until("the ranks began", lambda: len([p for p in folder.iterdir() if p.read_text()]) == 2)
    ranks = [int(path.read_text()) for path in folder.iterdir()]
    if isinstance(end, signal.Signals):
        assert all(map(is_running, ranks))
        caller.send_signal(end)
    _, err = caller.communicate(timeout=60)
    assert caller.returncode != 0
    assert ("rank 0 failed" in err) == (end == "fail")
    wait_until("the ranks ended", lambda: not any(map(is_running, ranks)))
