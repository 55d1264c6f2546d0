"""The page: what it says of each run, and that nothing in a run can break it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpasses.commands import app
from graphpasses.graph.pass_report import DrawnTimeline, PipelineReport, Span
from graphpasses.html_report import ShownRun, render_page
from graphpasses.parity.run_file import Run
from graphpasses.scale import Event, Speeds, Traffic, Transfer
from graphpasses.simulate import Topology
from tests.html_report.conftest import BIAS_FIRST, CLUSTER, EAGER, PASSES, WriteRun, layout


def text_of(page: str) -> str:
    """The page as people read it, roughly."""
    body = re.sub(r"(?s)<(style|script)>.*?</\1>", "", page).replace("</td>", " ")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body))


def render(*runs: Run) -> str:
    return render_page([ShownRun(run, CLUSTER) for run in runs]).decode()


def test_it_needs_nothing_else(write_run: WriteRun) -> None:
    page = render(write_run("eager", layout()), write_run("graph", layout(BIAS_FIRST), passes=PASSES))
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert page.count("<!doctype html>") == 1


def test_equal_runs(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager", layout()), write_run("graph", layout())))
    assert "Equal to A at all 4 common steps, bit for bit." in page
    assert "2 buckets. 0 gradients have another place (byte, bucket size or reduction);" in page
    assert "0 of them have elements that are reduced in another order or differently" in page


def test_runs_that_part(write_run: WriteRun) -> None:
    differs = {2: ["layers.0.up.bias"], 3: ["layers.0.up.bias"]}
    page = text_of(render(write_run("eager", layout()), write_run("graph", layout(BIAS_FIRST), differs=differs)))
    assert "Differs from A first in step 2: 1 gradients and 1 weights." in page
    assert "2 buckets. 4 gradients have another place (byte, bucket size or reduction);" in page
    assert "4 of them have elements that are reduced in another order or differently" in page
    assert "Every gradient that differs is among them (1): the layout explains it." in page


def test_three_runs_each_against_the_first(write_run: WriteRun) -> None:
    runs = [write_run(name, layout(EAGER)) for name in ("eager", "one", "two")]
    page = render(*runs)
    assert re.findall(r'<section id="(\w+)">', page) == ["A", "B", "C", "rings"]
    assert "B: one" in page
    assert "C: two" in page


def test_one_run(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager", layout(), passes=PASSES)))
    assert "A: eager" in page
    assert "2 buckets. Each bar is one rank's part of a bucket, its parameters to scale;" in page
    assert "another place" not in page
    assert "bucket-fsdp-collectives bitwise 2 40 → 33 7 → 3 0.0125" in page


def test_passes(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager"), write_run("graph", passes=PASSES)))
    assert "bucket-fsdp-collectives: 7 places of the graph, 1 notes" in page
    assert "Note: layers.0.&lt;b&gt;.weight: has no gradient" in page
    assert "all_gather_into_tensor: 6 → 2" in page
    assert "all_reduce:" not in page
    assert "The same at 3 places; the first:" in page
    assert "4 more places look different and are not shown." in page
    assert "Proof: 12 values proved equal in bits, 0 not proved; ms: 3.0" in page
    assert "B recorded no bucket layouts" in page


def test_a_run_that_was_cut_short(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager", layout()), write_run("graph", layout(), cut=400)))
    assert "3 (cut short)" in page
    assert "Equal to A at all 3 common steps" in page
    assert "Not compared: run B was cut short: it has 3 steps, 0 to 2." in page


def test_a_run_without_steps(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager", layout()), write_run("graph", layout(BIAS_FIRST), num_steps=0)))
    assert "not comparable" in page
    assert "It cannot be compared with A: the runs have no step in common" in page
    assert "4 gradients have another place" in page


def test_layouts_of_one_run_only(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager", layout()), write_run("graph", differs={0: ["layers.0.up.bias"]})))
    assert "Where gradients lie in their buckets is not known" in page
    assert "B recorded no bucket layouts" in page
    page = text_of(render(write_run("eager"), write_run("graph", layout())))
    assert "2 buckets. Each bar is one rank's part of a bucket, its parameters to scale;" in page
    assert "B, bucket 0" in page
    assert "another place" not in page


def test_a_run_of_another_seed(write_run: WriteRun) -> None:
    page = text_of(render(write_run("eager"), write_run("graph", seed=1), write_run("other")))
    assert "It cannot be compared with A: the runs began with seeds 0 and 1" in page
    assert "equal at all 4 steps" in page  # the third run


def test_clusters_of_other_sizes(write_run: WriteRun) -> None:
    a, b = (
        write_run("eager", layout()),
        write_run("graph", layout(num_ranks=8), num_ranks=8, differs={0: ["layers.0.up.bias"]}),
    )

    page = text_of(render_page([ShownRun(a, CLUSTER), ShownRun(b, Topology(8, gpus_per_node=8), True)]).decode())
    assert "The runs had other clusters, on which the same sum has another order." in page
    assert "8 ranks on 1 node, shared rings, 16 channels (assumed)" in page


def test_clusters_with_other_rings(write_run: WriteRun) -> None:
    a, b = write_run("eager", layout()), write_run("graph", layout(), differs={0: ["layers.0.up.bias"]})
    other = replace(CLUSTER, mode="cross_nic")
    page = text_of(render_page([ShownRun(a, CLUSTER), ShownRun(b, other)]).decode())
    assert "The runs had other clusters" in page
    assert "2 buckets. 0 gradients have another place (byte, bucket size or reduction). Each" in page


def test_names_cannot_break_the_page(write_run: WriteRun) -> None:
    run = write_run("<script>alert(1)<!--")
    page = render(run, run)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_what_was_not_compared_is_not_called_equal(write_run: WriteRun) -> None:
    def without(name: str, **options: Any) -> Run:
        run = write_run(name, **options)
        return replace(run, steps=tuple(replace(step, gradients={}) for step in run.steps))

    page = render(without("eager"), without("graph", differs={1: ["layers.0.up.bias"]}))
    assert "0</b> gradients and <b>1</b> weights" in page
    assert "Losses are equal, gradients were not compared: the backward pass, a reduction or the optimizer" in page
    assert "<tr><td>layers.0.up.bias</td><td>–</td><td>differs</td></tr>" in page


@pytest.mark.parametrize(
    "described",
    [
        {"gpus_per_node": "8"},
        {"mode": "H100 SXM"},
        {"gpus_per_node": 5},
        "2 x DGX",
        {"explicit_rings": None},
        None,
    ],
)
def test_clusters_that_are_described_otherwise(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: object
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_run("eager", layout()).path
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(header) | {"topology": described}) + "\n", *lines]))
    assert app.main(["report", str(path)]) == 0
    assert "16 ranks on 2 nodes, rail rings, 16 channels (assumed)" in Path("report.html").read_text()
    assert app.main(["report", str(path), "--mode", "cross_nic"]) == 0
    assert "16 ranks on 2 nodes, cross_nic rings, 16 channels<" in Path("report.html").read_text()


def test_a_number_of_ranks_that_nodes_of_8_do_not_hold(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["report", str(write_run("eager", num_ranks=12).path)]) == 0
    assert "12 ranks on 3 nodes, rail rings, 16 channels (assumed)" in Path("report.html").read_text()


def test_names_that_are_no_text(write_run: WriteRun) -> None:
    run = replace(write_run("eager"), path=Path("\udcff.jsonl"))
    assert b"?.jsonl" in render_page([ShownRun(run, CLUSTER)])


def test_the_command(write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(name, layout()).path) for name in ("eager", "graph")]
    out = tmp_path / "page.html"
    assert app.main(["report", *paths, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert "equal at all 4 steps" in out.read_text()
    assert app.main(["report", *paths, "--out", str(out), "--json"]) == 0
    assert f'"num_bytes": {out.stat().st_size}' in capsys.readouterr().out


def test_bad_input(write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_run("eager").path)
    nowhere = str(tmp_path / "missing" / "page.html")
    for arguments, message in (
        ([], "graphpasses: no run was given: graphpasses report RUN…, the reference first\n"),
        (["missing.jsonl"], "graphpasses: cannot read 'missing.jsonl': No such file or directory\n"),
        ([path, "--out", nowhere], f"graphpasses: cannot write '{nowhere}': No such file or directory\n"),
        (
            [path, "--ranks", "10"],
            f"graphpasses: '{path}' has 16 ranks, --ranks says 10\n",
        ),
        (
            [path, "--gpus-per-node", "5"],
            f"graphpasses: the cluster of '{path}': 16 ranks cannot fill nodes of 5 GPUs",
        ),
        (
            [path, "--out", path],
            f"graphpasses: --out is '{path}', which is one of the runs; name another file\n",
        ),
    ):
        assert app.main(["report", *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_the_step_on_more_ranks(write_run: WriteRun) -> None:
    gather = Transfer("all_gather", 4096, 16, 1)
    captured = Traffic(16, (gather, gather), tuple(Event("launch", index) for index in range(2)))
    bucketed = replace(captured, transfers=(gather,), events=captured.events[:1])
    passes = PipelineReport((replace(PASSES.passes[0], traffic=(captured, bucketed)),))
    run = write_run("graph", layout(), passes=passes)
    speeds = Speeds(ranks=(16, 4096), algorithms=("ring", "tree"))
    page = text_of(render_page([ShownRun(run, CLUSTER)], speeds).decode())
    assert "On more ranks, on paper" in page
    assert "s step with these buckets" in page
    assert "what passes did to the graph" in page
    assert re.search(r"4,096 captured 2 0\.0 38\.\d\d \+ 0\.00 0\.29 \+ 0\.00", page)
    assert re.search(r"4,096 after bucket-fsdp-collectives 1 0\.0 19\.\d\d", page)
    assert ": torchtitan makes buckets of tok_embeddings" in page
    assert "launch_latency 8.4 µs" in page


def test_nothing_recorded_is_not_timed(write_run: WriteRun) -> None:
    assert "On more ranks" not in render(write_run("eager", passes=PASSES))


def test_timelines_of_a_pass(write_run: WriteRun) -> None:
    spans = (
        Span("compute", 0.0, 0.003, "7 operators"),
        Span("4 ranks (0)", 0.001, 0.002, "all_gather, 1.0 MB: a"),
    )
    drawn = (
        DrawnTimeline("FSDP2's order", 0.004, 0.001, spans),
        DrawnTimeline("this order", 0.003, 0.0, spans[:1]),
    )
    report = PipelineReport((replace(PASSES.passes[0], timelines=drawn),))
    page = render(write_run("graph", layout(), passes=report))
    assert "FSDP2's order: 4.0 ms, of which 1.0 wait for collectives" in text_of(page).replace("&#39;", "'")
    assert page.count('class="span kept" style="left:0.000%;width:75.000%"') == 2
    assert page.count('class="span moved" style="left:25.000%;width:25.000%" data-tip="all_gather, 1.0 MB: a') == 1
