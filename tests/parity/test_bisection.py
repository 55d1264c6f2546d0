"""Wrong passes of a task: the operator at which its graph parts from eager, the pass, the rewrite and the script."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from graphpasses.commands import app
from graphpasses.errors import TaskError
from graphpasses.parity.bisection import locate_task
from graphpasses.parity.training import load_task
from graphpasses.simulate import Topology

pytestmark = pytest.mark.slow

TASK = """
from dataclasses import dataclass, replace
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from graphpasses import GraphPass, Numerics, default_pipeline

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def model():
    return nn.Sequential(Model(), Model(), nn.Linear(8, 2))

def shard(model, mesh):
    for part in (*model, model):
        fully_shard(part, mesh=mesh)

def loss_fn(model, x):
    return model(x).square().mean()

def batch(step, rank):
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)),)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def calls(graph, target):
    return graph.graph.find_nodes(op="call_function", target=target)

@dataclass(frozen=True)
class Wrong(GraphPass):
    name = "wrong"
    numerics = Numerics.BITWISE

    def rewrite(self, graph):
        {body}
        return 1

def pipeline(plan, layout):
    right = default_pipeline(plan, expected_layout=layout)
    return replace(right, passes=(*right.passes[:{at}], Wrong(), *right.passes[{at}:]))
"""

REDUCE = "torch.ops._c10d_functional.reduce_scatter_tensor.default"
# What the pass does; the operator of eager, its module, and what in its rewrite is seen.
FAULTS = {
    "changed kernel": (
        'node = calls(graph, torch.ops.aten.gelu.default)[1]; node.kwargs = {"approximate": "tanh"}',
        ("result", "aten.gelu.default", "1.act"),
        "approximate=tanh",
    ),
    "sum for average": (
        f'node = calls(graph, {REDUCE})[1]; node.args = (node.args[0], "sum", *node.args[2:])',
        ("missing", "fsdp.reduce_gradient", "1.up"),
        "reduce_op=sum",
    ),
    "other residual": (
        "node = calls(graph, torch.ops.aten.add.Tensor)[1]; node.args = (node.args[1], node.args[1])",
        ("inputs", "aten.add.Tensor", "1"),
        "reads something else in run B: self",
    ),
    "other weight": (
        "a, b = [n for n in calls(graph, torch.ops.aten.addmm.default)][:2]; b.args = (*b.args[:2], a.args[2])",
        ("inputs", "aten.addmm.default", "0.down"),
        "mat2",
    ),
}

# What the scripts print, with as many passes as they were written with, or with others.
SCRIPTS = {
    "changed kernel": {
        "": "aten.gelu.default [] {}\n"
        "  computes what the run computed: True\n"
        "aten.gelu.default [] {'approximate': 'tanh'}\n"
        "  computes what the run computed: True\n"
        "both runs' operators compute the same bits: False\n"
    },
    "sum for average": {
        "PASSES = 5": "different Divergence(step=0, loss=False",  # the last is the wrong one
        "PASSES = 4": "equal None\n",
    },
}


def write_task(path: Path, body: str) -> Path:
    # A wrong reduction is refused where the buckets must have eager's layout.
    path.write_text(TASK.replace("{body}", body).replace("{at}", "4" if REDUCE in body else "2"))
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_finds_operator_pass_and_rewrite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, expected, seen = FAULTS[name]
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "task.py", body)
    command = ["locate", "task.py", "--ranks", "2", "--gpus-per-node", "2", "--steps", "1", "--json"]
    assert app.main(command) == 1
    found = json.loads(capsys.readouterr().out)
    operator = found["difference"]["a"]
    assert (found["difference"]["kind"], operator["operator"], operator["module"]) == expected
    assert found["pass"] == "wrong"
    assert seen in found["culprit"]
    assert found["script"] == "runs/locate/reproduce.py"
    script = Path("runs/locate/reproduce.py")
    for passes, printed in SCRIPTS.get(name, {}).items():
        if passes:
            script.write_text(script.read_text().replace("PASSES = 5", passes))  # as the user edits it
            runpy.run_path(str(script), run_name="__main__")
            assert capsys.readouterr().out.startswith(printed)
        else:  # it needs torch alone
            result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
            assert result.stdout.startswith(printed)


def test_operator_from_python(tmp_path: Path) -> None:
    """Without the task's file there is a script only where one operator shows the difference."""
    task = load_task(str(write_task(tmp_path / "task.py", FAULTS["other residual"][0])))
    location = locate_task(task, Topology(2, gpus_per_node=2), 1, tmp_path)
    assert location.difference is not None
    assert location.script is None


def test_a_later_step(tmp_path: Path) -> None:
    """The pass limits an activation that exceeds the limit in step 2 alone."""
    body = (
        "node = calls(graph, torch.ops.aten.gelu.default)[0]\n"
        "        with graph.graph.inserting_after(node):\n"
        "            new = graph.emit(torch.ops.aten.clamp_max.default, (node, 100.0), like=node)\n"
        "        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)"
    )
    task = write_task(tmp_path / "task.py", body)
    text = task.read_text().replace("manual_seed(10 * step + rank)),)", "manual_seed(rank)) * 1000 ** (step == 2),)")
    task.write_text(text)
    topology = Topology(2, gpus_per_node=2)
    location = locate_task(load_task(str(task)), topology, 4, tmp_path)
    assert location.difference is not None
    assert (location.difference.step, location.pass_name) == (2, "wrong")
    assert location.difference.operator is not None
    assert location.difference.operator.operator == "aten.clamp_max.default"
    assert location.difference.operator.where.module == "0.act"
    assert locate_task(load_task(str(task)), topology, 2, tmp_path).difference is None


def test_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "task.py", "pass")
    assert app.main(["locate", "task.py", "--ranks", "2", "--gpus-per-node", "2", "--steps", "2"]) == 0
    assert capsys.readouterr().out == "equal: nothing differs\n"
    assert not Path("runs/locate/reproduce.py").exists()


def test_a_task_that_is_no_function(tmp_path: Path) -> None:
    """The eighth batch, that of the graph's second step on rank 0, is another."""
    task = write_task(tmp_path / "task.py", "pass")
    task.write_text(
        task.read_text() + "\nnum = []\nold = batch\ndef batch(step, rank):\n    num.append(1)\n"
        "    return (old(step, rank)[0] * (1 + (len(num) == 8)),)\n"
    )
    with pytest.raises(TaskError) as error:
        locate_task(load_task(str(task)), Topology(2, gpus_per_node=2), 2, tmp_path)
    assert str(error.value).startswith("the runs parted in step 1, and did not when it was run again: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.jsonl"], "'run.jsonl' is a run; give a second one to compare it with, or a task"),
        (["task.py", "--steps", "0"], "--steps is 0; it must be at least 1"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["locate", *arguments]) == 2
    assert capsys.readouterr().err == f"graphpasses: {message}\n"
