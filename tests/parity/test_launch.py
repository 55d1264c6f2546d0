"""Ranks end with their caller, and say how they ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from graphpasses.parity.launch import RankError, run_ranks

SCRIPT = """
import os, sys, time
from pathlib import Path

from graphpasses.parity.launch import run_ranks


def train(folder):
    import torch.distributed as dist  # which the caller does without

    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    if sys.argv[2] == "fail" and dist.get_rank() == 0:
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        raise ValueError("no kernel")
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    run_ranks(train, 2, sys.argv[1], preload=("torch", "graphpasses.simulate"))
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
import json
import sys
from pathlib import Path

from graphpasses.parity.launch import RankError, run_ranks

folder = Path(sys.argv[1])


def get_rank():
    return dist.get_rank()


def break_connections(*args, rank, **kwargs):
    num_failures, error = json.loads((folder / "case.json").read_text())
    launch = len(list(folder.glob("failure-*")))
    connect(*args, rank=rank, **kwargs)
    if rank == 0 and launch < num_failures:
        (folder / f"failure-{launch}").touch()
        raise RuntimeError(error)


if __name__ != "__main__":  # a rank; the caller does without torch
    import torch.distributed as dist

    connect, dist.init_process_group = dist.init_process_group, break_connections
else:
    for case in json.loads(sys.argv[2]):
        (folder / "case.json").write_text(json.dumps(case))
        try:
            print(run_ranks(get_rank, 2))
        except RankError as error:
            print(str(error).splitlines()[-1])
        failures = list(folder.glob("failure-*"))
        print(len(failures))
        print("end of case", file=sys.stderr)
        for each in failures:
            each.unlink()
"""
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
# How many launches fail and by what; then what is printed, how many failed, and how many were made again.
CASES = [
    (2, GLOO, "[0, 1]", 2, 2),
    (3, GLOO, f"RuntimeError: {GLOO}", 3, 2),
    (1, "no such interface", "RuntimeError: no such interface", 1, 0),  # no other launch would have one
]


@pytest.mark.multiprocess
def test_unconnected_ranks_are_launched_again(tmp_path: Path) -> None:
    """One process for all cases: importing torch takes longer than they do."""
    script = tmp_path / "script.py"
    script.write_text(BREAKS)
    command = [sys.executable, str(script), str(tmp_path), json.dumps([case[:2] for case in CASES])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    printed = [line for case in CASES for line in (case[2], str(case[3]))]
    assert result.stdout.splitlines() == printed, result.stderr
    again = [part.count("are launched again, since gloo") for part in result.stderr.split("end of case")[:-1]]
    assert again == [case[4] for case in CASES]


def end_by_signal() -> None:
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGABRT)
    time.sleep(60)


def end_beside_python() -> None:
    if dist.get_rank() == 1:
        libc = ctypes.CDLL(None)
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(60)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "where"), [(end_by_signal, ""), (end_beside_python, " in a thread that runs no Python, such as gloo's")]
)
def test_a_rank_that_a_signal_ends_says_where(end: Callable[[], None], where: str) -> None:
    with pytest.raises(RankError, match=rf"rank 1 died without a traceback \(SIGABRT{where}\):") as error:
        run_ranks(end, 2)
    assert f"in {end.__name__}" in str(error.value)
    assert "no Python frame" not in str(error.value)
