"""``graphpasses simulate``: rings and orders of addition."""

from __future__ import annotations

import json

import pytest

from graphpasses.commands import app


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["simulate", "--ranks", "4", "--gpus-per-node", "2", "--num-elements", "20000"]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "4 ranks on 2 nodes, rail rings, 16 channels; reduce_scatter of 20,000 bfloat16:"
    assert header.split() == ["channel", "first", "element", "elements", "order", "of", "addition"]
    assert [row.split()[-4:] for row in rows] == [list("1230"), list("3210"), list("1230")]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "4", "--gpus-per-node", "2", "--collective", "all_reduce", "--num-elements", "8"]
    assert app.main(["simulate", *options, "--dtype", "float32", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(part["start"], part["stop"]) for part in data["parts"]] == [(0, 4), (4, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "16"], "--rank is 16; the cluster has ranks 0 to 15"),
        (["--num-elements", "0"], "--num-elements is 0; it must be at least 1"),
        (["--dtype", "bf16"], "a bucket's dtype must be a torch dtype such as 'bfloat16', not 'bf16'"),
        (["--gpus-per-node", "5"], "16 ranks cannot fill nodes of 5 GPUs; num_ranks must be a multiple of"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["simulate", *options]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: {message}")
