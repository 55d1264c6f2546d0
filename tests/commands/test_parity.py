"""``graphpasses parity``: a task of the user's, both ways on a simulated cluster."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

from graphpasses.commands import app
from graphpasses.commands.cluster_options import known_fields
from graphpasses.parity import read_run
from graphpasses.simulate import Topology

TASK = """
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

name, seed = "two layers", 3

def model():
    return nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 10, bias=False))

def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

def loss_fn(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float(), tokens)

def batch(step, rank):
    return (torch.randint(10, (12,), generator=torch.Generator().manual_seed(100 * step + rank)),)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def test_equal_on_ranks_with_shards_of_several_shapes(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 rows on 8 ranks: two, or none."""
    assert app.main(["parity", "task.py", "--ranks", "8", "--gpus-per-node", "4", "--steps", "2"]) == 0
    assert "equal: all 2 common steps, bit for bit" in capsys.readouterr().out
    eager, graph = (read_run(f"runs/parity/{name}.jsonl") for name in ("eager", "graph"))
    assert (eager.header.model, eager.header.seed, eager.header.run) == ("two layers", 3, "eager FSDP2")
    assert eager.header.layouts == graph.header.layouts
    assert Topology(**known_fields({**eager.header.topology}, 8), num_ranks=8) == Topology(8, gpus_per_node=4)


def test_hybrid_sharding(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task.write_text(TASK + "\nnum_replicas = 2\n")
    assert app.main(["parity", "task.py", "--ranks", "8", "--gpus-per-node", "4", "--steps", "2"]) == 0
    assert "equal: all 2 common steps, bit for bit" in capsys.readouterr().out
    layout = read_run("runs/parity/graph.jsonl").header.layouts
    assert layout
    assert [(bucket.collective, bucket.ranks) for bucket in layout.buckets[:2]] == [
        ("reduce_scatter", (0, 1, 2, 3)),
        ("all_reduce", (0, 4)),
    ]
    assert app.main(["report", "runs/parity/eager.jsonl", "runs/parity/graph.jsonl"]) == 0
    assert "all_reduce" in Path("report.html").read_text()


def test_replicas_that_do_not_divide_the_ranks(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num in (3, 0, 8):
        task.write_text(f"{TASK}\nnum_replicas = {num}\n")
        assert app.main(["parity", "task.py", "--ranks", "4", "--gpus-per-node", "2"]) == 2
        assert capsys.readouterr().err == (
            f"graphpasses: task 'two layers' has num_replicas = {num}, which does not divide the 4 ranks of the "
            "cluster\n"
        )


def test_different(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task that is no function of its arguments trains otherwise the second time."""
    task.write_text(
        f"{TASK}\ncalls = []\nold = batch\n"
        """
def batch(step, rank):
    calls.append(1)
    return old(step + 7 * (len(calls) > 4), rank)
"""
    )
    command = [
        "parity",
        "task.py",
        "--ranks",
        "4",
        "--gpus-per-node",
        "2",
        "--steps",
        "1",
        "--out",
        "here",
        "--json",
    ]
    assert app.main(command[:-1]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "to find the operator and the pass: graphpasses locate task.py --ranks 4 --gpus-per-node 2 --steps 1"
    )
    task.write_text(task.read_text())  # which counts its calls anew
    assert app.main(command) == 1
    assert json.loads(capsys.readouterr().out)["divergence"]["step"] == 0
    assert read_run("here/graph.jsonl").complete


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def model(): ...\ndef batch(step, rank): ...",
            "'task.py' does not define shard(), loss_fn(); a task has ",
        ),
        ("import no_such_module", "cannot import 'task.py': No module named 'no_such_module'"),
        ("def model(:", "cannot import 'task.py': invalid syntax (task.py, line 1)"),
        ("import sys\nsys.exit()", "'task.py' ends the program when it is imported, by sys.exit(None)"),
    ],
)
def test_a_task_that_is_none(task: Path, source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    task.write_text(source)
    assert app.main(["parity", "task.py"]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: {message}")


@pytest.mark.parametrize("command", ["parity", "locate"])
def test_a_folder_that_cannot_be_made(task: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--gpus-per-node", "2", "--steps", "1", "--out"]
    assert app.main([command, "task.py", *options, "task.py/x"]) == 2
    assert capsys.readouterr().err == "graphpasses: cannot use 'task.py/x': Not a directory\n"


def test_what_fails_on_a_rank(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task.write_text(f"{TASK}\ndef batch(step, rank):\n    raise IndexError('out of data')\n")
    assert app.main(["parity", "task.py", "--ranks", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("graphpasses: rank 0 failed:\nTraceback")
    assert "IndexError: out of data" in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def batch(step, rank): return torch.arange(10)",
            "batch() of task 'two layers' returns a Tensor; return the ",
        ),
        ("def shard(model, mesh): ...", "the model has no FSDP2 parameter group; call fully_shard on it first"),
    ],
)
def test_what_is_refused_on_a_rank(task: Path, source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    task.write_text(f"{TASK}\n{source}\n")
    assert app.main(["parity", "task.py", "--ranks", "2", "--steps", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: rank 0 failed: {message}")


def test_an_interrupt(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task.write_text(
        f"{TASK}\nimport signal, threading\n"
        """
def batch(step, rank):
    if (step, rank) == (1, 0):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    return (torch.arange(10),)
"""
    )
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers have another
    try:
        assert app.main(["parity", "task.py", "--ranks", "2", "--steps", "10000"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "graphpasses: interrupted\n"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert not read_run("runs/parity/eager.jsonl").complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--ranks", "6", "--gpus-per-node", "4"], "6 ranks cannot fill nodes of 4 GPUs"),
    ],
)
def test_wrong_options(task: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["parity", "task.py", *options]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: {message}")


def test_nothing_of_an_earlier_command_stays(task: Path) -> None:
    command = ["parity", "task.py", "--ranks", "2", "--steps", "1", "--out", "here"]
    assert app.main(command) == 0
    task.write_text(f"{TASK}\ndef loss_fn(model, tokens):\n    raise IndexError('out of data')\n")
    assert app.main(command) == 2
    assert not Path("here/graph.jsonl").exists()
    assert not read_run("here/eager.jsonl").complete


def test_no_such_file(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["parity", "no_such_task.py"]) == 2
    missing = task.with_name("no_such_task.py")
    assert capsys.readouterr().err == (
        f"graphpasses: cannot import 'no_such_task.py': [Errno 2] No such file or directory: '{missing}'\n"
    )
