"""``graphpasses layout``: what it shows, predicts and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from graphpasses.commands import app
from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.parity.run_file import RunHeader, end_line, header_line
from graphpasses.simulate import Topology

SHAPES = {"w": (512, 100), "b": (512,), "norm": (8,)}
TOPOLOGY = {**asdict(Topology(16, gpus_per_node=8)), "name": "of my cluster"}


def write(path: Path, order: Iterable[str] | None, op: str = "avg") -> str:
    layout = None
    if order is not None:
        parameters = [(fqn, SHAPES[fqn], 0) for fqn in order]
        layout = Layout((make_bucket_layout("reduce_scatter", range(16), op, torch.bfloat16, parameters),))
    path.write_bytes(header_line(RunHeader("2.13.0", 16, topology=TOPOLOGY, layouts=layout)) + end_line(0))
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a.jsonl", ("w", "b", "norm")), write(tmp_path / "b.jsonl", ("b", "w", "norm"))


def test_show(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["layout", "show", runs[0]]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["bucket", "reduction", "parameter", "byte", "elements", "padded"]
    assert first.split("  ")[0] == "0"
    assert "reduce_scatter avg bfloat16, 16 ranks, 6466 bytes each" in first
    assert app.main(["layout", "show", runs[0], "--json"]) == 0
    assert Layout.from_json(json.loads(capsys.readouterr().out)).buckets[0].num_bytes == 6466


def test_diff(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["layout", "diff", *runs]) == 1
    out = capsys.readouterr().out
    assert out.startswith("on 16 ranks on 2 nodes, rail rings, 16 channels:\n")
    assert "elements (" in out
    assert app.main(["layout", "diff", runs[0], runs[0]]) == 0
    assert "no element would be added in another order" in capsys.readouterr().out
    assert app.main(["layout", "diff", *runs, "--mode", "shared", "--num-channels", "4"]) == 0


def test_sums_that_are_premul_sums_in_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "sum.jsonl", ("w", "b"), "sum")
    options = [
        "layout",
        "diff",
        run,
        run,
        "--gpus-per-node",
        "1",
        "--algorithm",
        "auto",
        "--protocol",
        "auto",
    ]
    assert app.main(options) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "if eager has a gradient divide factor of 1 (torchtitan), and so PREMUL_SUM: bucket 0, reduce_scatter" in out
    )
    assert "NCCL takes ring ll for eager's PREMUL_SUM and pat simple for the graph's SUM; set NCCL_ALGO=" in out
    assert app.main([*options, "--env", "NCCL_ALGO=reducescatter:ring"]) == 0
    assert "PREMUL_SUM" not in capsys.readouterr().out


def test_diff_as_json(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["layout", "diff", *runs, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["topology"]["mode"], data["reordered"][0]["fqn"]) == ("rail", "w")
    assert data["reordered"][0]["num_elements"] > 0


def test_sweep(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["layout", "diff", *runs, "--ranks", "8", "--sweep"]) == 1  # one node alone shows nothing
    header, *rows = capsys.readouterr().out.split("added in another order:")[1].strip().splitlines()
    assert header.split()[:3] == ["ranks", "1", "channels"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert set(cells["8"]) == {"–"}
    assert cells["16"][0] == "–"
    assert "bytes" in cells["16"]


def test_rings_of_a_log(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "nccl.log"
    forth, back = " ".join(map(str, range(16))), " ".join(map(str, reversed(range(16))))
    log.write_text(f"Channel 00/02 : {forth}\nChannel 01/02 : {back}\n")
    assert app.main(["layout", "diff", *runs, "--nccl-log", str(log)]) == 1
    assert "explicit rings, 2 channels:" in capsys.readouterr().out
    log.write_text(f"Channel 00/02 : {forth}\nChannel 01/02 : {forth}\n")
    assert app.main(["layout", "diff", *runs, "--nccl-log", str(log)]) == 0


VERSION = "NCCL version 2.30.3+cuda12.9\n"
TAKEN = "ReduceScatter: 6466 Bytes -> Algo {} proto LL channel{{Lo..Hi}}={{0..0}}\n"
FORTH = tuple(range(16))
SWAPPED = (0, 2, 1, *range(3, 16))


def write_log(path: Path, ring: Iterable[int], text: str = VERSION + TAKEN.format("RING")) -> str:
    ranks = " ".join(map(str, ring))
    path.write_text("".join(f"Channel 0{channel}/02 : {ranks}\n" for channel in range(2)) + text)
    return str(path)


def test_two_logs(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_log(tmp_path / f"{name}.log", ring) for name, ring in (("a", FORTH), ("b", SWAPPED)))
    assert app.main(["layout", "diff", "--log", a, "--log", b, runs[0]]) == 1
    first, second, head, w, *_, verdict, remedy = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"A: {a}, NCCL 2.30.3, 2 channels", f"B: {b}, NCCL 2.30.3, 2 channels")
    assert head.split() == ["gradient", "bits", "elements", "of", "why"]
    assert w.split()[:5] == ["w", "may", "differ", "51,200", "51,200"]
    assert w.endswith("A: ring ll, 1 channel, 1 2 3 4 5 6 7 8 …; B: ring ll, 1 channel, 2 1 3 4 5 6 7 8 …")
    assert verdict == "gradients: 0 with the same bits, 3 may differ, 0 unknown"
    assert " have in B's log ranks 0 2 1 3 4 " in remedy
    assert app.main(["layout", "diff", "--log", a, "--log", a, runs[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["gradients"][0]["bits"]) == ("equal", "same bits")
    other = write_log(tmp_path / "b.log", FORTH, VERSION + TAKEN.format("NVLS"))
    assert app.main(["layout", "diff", "--log", a, "--log", other, runs[0]]) == 2
    assert "B: NCCL takes NVLS for reduce_scatter (avg)" in capsys.readouterr().out
    assert app.main(["layout", "diff", "--log", a, "--log", other, runs[0], "--algorithm", "ring"]) == 2
    out = capsys.readouterr().out
    assert "B: what NCCL takes for reduce_scatter of 6,466 bytes is in no log" in out


@pytest.mark.parametrize(
    ("ring", "text", "message"),
    [
        ((), VERSION, 'no line "Channel cc/NN : 0 1 2 ..." in the log; it is printed by rank 0'),
        (range(4), VERSION, "'a.jsonl' has 16 ranks, 'a.log' 16 and 'b.log' 4; logs of its size are needed"),
        (FORTH, "", "'b.log' has no line \"NCCL version 2…\", which decides how buckets are split"),
        (
            FORTH,
            "NCCL version 2.18.1+cuda12.1",
            "'b.log': nccl_version is \"2.18.1\"; choices are modelled for",
        ),
        (FORTH, None, "cannot read 'b.log': No such file or directory"),
    ],
)
def test_logs_that_do_not_fit(
    ring: Iterable[int],
    text: str | None,
    message: str,
    runs: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a.log", FORTH)
    if text is not None:
        write_log(tmp_path / "b.log", ring, text)
    assert app.main(["layout", "diff", "--log", "a.log", "--log", "b.log", "a.jsonl"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--log", "b.log", "b.jsonl"], ["--log", "b.log", "--nccl-log", "b.log"]])
def test_one_log_or_two_runs(more: list[str], runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["layout", "diff", "--log", "a.log", runs[0], *more]) == 2
    message = "two logs compare one run on two clusters: layout diff --log A --log B RUN"
    assert capsys.readouterr().err == f"graphpasses: {message}\n"
    assert app.main(["layout", "diff", runs[0]]) == 2
    assert "give two runs, or two logs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--ranks", "12"],
            "12 ranks cannot fill nodes of 8 GPUs; num_ranks must be a multiple of gpus_per_node",
        ),
        (["--num-channels", "0"], "num_channels is 0; it must be at least 1"),
        (["--nccl-log", "no.log"], "cannot read 'no.log': No such file or directory"),
        (["--nccl-log", "x", "--mode", "rail"], "a log gives the rings and channels; leave --mode out"),
    ],
)
def test_impossible_clusters(
    runs: tuple[str, str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["layout", "diff", *runs, *options]) == 2
    assert capsys.readouterr().err == f"graphpasses: {message}\n"


def test_a_log_of_other_rings(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("Channel 00/01 : 0 1 1 3\n")
    assert app.main(["layout", "diff", *runs, "--nccl-log", str(log)]) == 2
    assert "channel 00 of the log is [0, 1, 1, 3], not a permutation" in capsys.readouterr().err
    log.write_text("Channel 00/01 : 0 1 2 3\n")
    assert app.main(["layout", "diff", *runs, "--nccl-log", str(log), "--ranks", "16"]) == 2
    assert capsys.readouterr().err == f"graphpasses: '{log}' has 4 ranks, --ranks says 16\n"


def test_a_run_without_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", None)
    assert app.main(["layout", "show", path]) == 2
    assert capsys.readouterr().err.startswith(f"graphpasses: '{path}' has no bucket layouts; record it with Parity")


def test_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buckets = (
        make_bucket_layout("all_reduce", ranks, "sum", torch.bfloat16, [("norm", (64,), 0)])
        for ranks in (range(5), range(0, 40, 5))
    )
    run = tmp_path / "a.jsonl"
    run.write_bytes(header_line(RunHeader("2.13.0", 40, layouts=Layout(tuple(buckets)))) + end_line(0))
    options = ["layout", "drift", str(run), "--mesh", "outer=8", "inner=5"]
    assert app.main(options) == 1
    where, head, outer, inner, verdict = capsys.readouterr().out.splitlines()
    assert where == "on 40 ranks on 5 nodes, rail rings, 16 channels:"
    assert head.split() == ["gradient", "axis", "bits", "holders", "that", "may", "differ", "why"]
    assert " ".join(outer.split()) == "norm outer same bits one all_reduce gives all of them one sum"
    assert inner.startswith("norm      inner  may differ  0|1|2|3|4 and 7 more     all_reduce over outer adds 5 15 ")
    assert verdict == "gradients, along each axis: 1 with the same bits, 1 may differ, 0 unknown"
    assert app.main([*options, "--gpus-per-node", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "equal"
    assert app.main([*options, "--algorithm", "auto", "--protocol", "auto"]) == 2
    assert app.main([*options[:-1], "inner"]) == 2
    assert capsys.readouterr().err == (
        "graphpasses: --mesh is 'outer=8 inner'; write NAME=VALUE, each name once, as in --mesh dp=8 tp=5\n"
    )
    sharded = make_bucket_layout("reduce_scatter", range(4), "sum", torch.bfloat16, [("norm", (64,), 0)])
    run.write_bytes(header_line(RunHeader("2.13.0", 4, layouts=Layout((sharded,)))) + end_line(0))
    assert app.main([*options[:3], "--mesh", "dp=4"]) == 0
    assert capsys.readouterr().out.startswith("no gradient has several holders along an axis of the mesh dp=4: ")


def test_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, speeds = write(tmp_path / "a.jsonl", ("w", "b")), tmp_path / "speeds.toml"
    speeds.write_text('ranks = [8, 64]\nalgorithms = ["ring", "tree"]\ntokens = 100\n')
    options = ["layout", "show", run, "--scale", "--speeds", str(speeds)]
    assert app.main(options) == 0
    title, header, *rows, note, assumed = capsys.readouterr().out.splitlines()
    assert title == "FSDP2's step with these buckets; time on the wire per step, exposed + hidden, in ms:"
    assert header.split() == ["ranks", "step", "collectives", "MB", "ring", "tree"]
    assert [row.split("  ")[0] for row in rows] == ["8", "8", "64", "64"]
    assert note == (
        "without torchtitan's buckets: torchtitan makes buckets of tok_embeddings, layers.N, norm and lm_head; there "
        "are no such parameters"
    )
    assert assumed.startswith("assumed: gpus_per_node 8, launch_latency 8.4 µs, ")
    assert "tokens" not in assumed
    assert app.main([*options, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"].values()
    ours = [row for row in table["rows"] if row["step"] == "the run's buckets"]
    assert [row["num_transfers"] for row in ours] == [3, 3]
    near, far = (row["times"]["ring"] for row in ours)
    assert near["wire"] < far["wire"]
    assert far["wire"] == pytest.approx(far["exposed"] + far["hidden"])


def test_scale_of_torchtitans_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        "tok_embeddings.weight",
        "layers.0.up.weight",
        "layers.0.down.weight",
        "norm.weight",
        "lm_head.weight",
    ]
    parameters = [(name, (64, 8), 0) for name in names]
    layout = Layout((make_bucket_layout("reduce_scatter", range(16), "avg", torch.bfloat16, parameters),))
    path = tmp_path / "run.jsonl"
    path.write_bytes(header_line(RunHeader("2.13.0", 16, layouts=layout)) + end_line(0))
    assert app.main(["layout", "show", str(path), "--scale", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"].values()
    numbers = {row["step"]: row["num_transfers"] for row in table["rows"]}
    assert numbers == {
        "no passes: one per parameter": 15,
        "the run's buckets": 3,
        "torchtitan's buckets": 9,
    }


def test_scale_refuses_wrong_speeds(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = tmp_path / "speeds.toml"
    speeds.write_text("flops = 0\n")
    assert app.main(["layout", "show", runs[0], "--scale", "--speeds", str(speeds)]) == 2
    assert capsys.readouterr().err == f"graphpasses: '{speeds}': flops is 0; it must be above 0\n"
    assert app.main(["layout", "show", runs[0], "--speeds", str(speeds)]) == 2
    assert capsys.readouterr().err == "graphpasses: --speeds is for --scale; give both\n"
