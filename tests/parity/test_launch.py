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


BREAKS = """
import sys
from pathlib import Path

import torch.distributed as dist

connect = dist.init_process_group


def break_connections(*args, rank, **kwargs):
    launch = len(list(Path(sys.argv[1]).iterdir()))
    connect(*args, rank=rank, **kwargs)
    if rank == 0 and launch < int(sys.argv[2]):
        Path(sys.argv[1], str(launch)).touch()
        raise RuntimeError(sys.argv[3])


dist.init_process_group = break_connections

from graphpasses.parity.launch import RankError, run_ranks

if __name__ == "__main__":
    try:
        print(run_ranks(dist.get_rank, 2, preload=("torch",)))
    except RankError as error:
        print(str(error).splitlines()[-1])
"""
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize(
    ("num_failures", "error", "printed", "num_launches"),
    [
        (2, GLOO, "[0, 1]", 3),
        (3, GLOO, f"RuntimeError: {GLOO}", 3),
        (1, "no such interface", "RuntimeError: no such interface", 1),  # no other launch would have one
    ],
)
@pytest.mark.multiprocess
def test_unconnected_ranks_are_launched_again(
    tmp_path: Path, num_failures: int, error: str, printed: str, num_launches: int
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "failures"
    script.write_text(BREAKS)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder), str(num_failures), error]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout == f"{printed}\n", result.stderr
    assert len(list(folder.iterdir())) == min(num_failures, num_launches)
    assert result.stderr.count("2 ranks are launched again, since gloo did not connect them") == min(
        num_failures, num_launches - 1
    )
