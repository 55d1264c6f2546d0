"""Every subcommand's help has an example, and the example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from graphpasses.commands import app
from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.parity.run_file import RunHeader, StepRecord, end_line, header_line, step_line

COMMANDS = (
    "parity",
    "compare",
    "locate",
    "layout show",
    "layout diff",
    "layout drift",
    "simulate",
    "passes",
    "report",
)


TASK = """
import torch
from torch.distributed.fsdp import fully_shard

def model():
    return torch.nn.Linear(8, 4)

def shard(model, mesh):
    fully_shard(model, mesh=mesh)

def loss_fn(model, x):
    return model(x).square().mean()

def batch(step, rank):
    return (torch.full((2, 8), step + rank / 8),)
"""


def test_no_subcommand_is_missing_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    listed = re.search(r"\{(.*?)\}", "".join(capsys.readouterr().out.split()))
    assert listed
    assert {command.split()[0] for command in COMMANDS} == set(listed[1].split(","))


@pytest.mark.parametrize("command", COMMANDS)
def test_example(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = make_bucket_layout("reduce_scatter", range(4), "avg", torch.bfloat16, [("weight", (4, 2), 0)])
    for name in ("eager.jsonl", "compiled.jsonl"):
        header = RunHeader("2.13.0", 4, layouts=Layout((bucket,)))
        record = StepRecord(0, None, {"weight": "0" * 32}, {})
        (tmp_path / name).write_bytes(header_line(header) + step_line(record) + end_line(1))
    (tmp_path / "my_model.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    assert app.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "Exit codes: " in text
    example = re.search(r"^Example: graphpasses (.*)$", text, re.MULTILINE)
    assert example
    assert example[1].startswith(command)
    assert app.main(shlex.split(example[1])) == 0
