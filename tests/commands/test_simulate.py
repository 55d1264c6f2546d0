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


def test_choice(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "16", "--algorithm", "auto", "--protocol", "auto", "--nccl-version", "2.28"]
    assert app.main(["simulate", *options, "--num-elements", "10000", "--compute-capability", "90"]) == 0
    _, title, header, ring, assumed, hint, *_ = capsys.readouterr().out.splitlines()
    assert title == "NCCL takes ring ll for avg, by the model, in microseconds:"
    assert header.split() == ["algorithm", "ll", "ll128", "simple"]
    # LL, 14 steps in nodes and one between them, 320,000 bytes at 39 GB/s (Intel): 6.6 + 14 + 2.7 + 320 / 41.6.
    assert ring.split() == ["ring", "31.0", "←", "45.6", "70.9"]
    assert assumed.startswith(
        "assumed, since nothing says it: intra_bandwidth 40.0 GB/s, inter_bandwidth 40.0 GB/s, "
    )
    assert "NCCL_DEBUG_SUBSYS=INIT,TUNING" in hint


def test_what_is_not_modelled_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "8", "--collective", "all_reduce", "--op", "sum", "--num-elements", "64000000"]
    options += ["--algorithm", "auto", "--protocol", "auto"]
    assert app.main(["simulate", *options]) == 0
    assert "NCCL takes NVLS for all_reduce (sum)" in " ".join(capsys.readouterr().out.split())
    assert app.main(["simulate", *options, "--json", "--env", "NCCL_ALGO=allreduce:ring"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["choice"]["algorithm"], data["refused"]) == ("ring", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--ranks 0", "num_ranks is 0; it must be at least 1"),
        ("--algorithm auto --intra-bandwidth nan", "intra_bandwidth is nan; it must be above 0"),
        ("--env NCCL_ALGO", "--env is 'NCCL_ALGO'; write NAME=VALUE, each name once, as in"),
        ("--env NCCL_ALGO=ring NCCL_ALGO=tree", "--env is 'NCCL_ALGO=ring NCCL_ALGO=tree'; write NAME=VALUE, each"),
    ],
)
def test_values_that_mean_nothing(options: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["simulate", *options.split()]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: {reason}")
    assert app.main(["simulate", "--ranks", "1", "--env", "NCCL_ALGO=ring"]) == 0


def test_unknown_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["simulate", "--env", "NCCL_ALGOS=ring"]) == 2
    assert capsys.readouterr().err.startswith("graphpasses: --env does not know NCCL_ALGOS; it knows NCCL_ALGO, ")
