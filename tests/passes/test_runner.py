"""Pipelines: what they refuse, what they report, and what they leave alone."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import graphpasses
from graphpasses.capture import capture_train_step
from graphpasses.errors import GraphPassesError, PipelineError, UnknownPassError, UnsupportedError
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import (
    BucketFSDPCollectives,
    CanonicalReductions,
    CoalesceGradReductions,
    DeduplicateShared,
    PrefetchCollectives,
    default_pipeline,
)
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.models import LanguageModel, on_fake_ranks

aten = torch.ops.aten


def detaches(graph: TrainGraph) -> list[fx.Node]:
    """That of the loss, which later torch traces as an alias; torch 2.13 also those of what autograd saves."""
    return [node for node in graph.graph.nodes if node.target in (aten.detach.default, aten.alias.default)]


def has_detach(code: str) -> bool:
    return "aten.detach" in code or "aten.alias" in code


@dataclass(frozen=True)
class RemoveDetach(GraphPass):
    """Removes detaches."""

    name = "remove-detach"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        nodes = detaches(graph)
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
        return len(nodes)


@dataclass(frozen=True)
class Note(GraphPass):
    """Notes its text."""

    name = "note"
    numerics = Numerics.ROUNDING
    runs_after = frozenset({"remove-detach"})

    text: str = "layers.0.weight: left alone"

    def rewrite(self, graph: TrainGraph) -> int:
        graph.note(self.text)
        return 0


@dataclass(frozen=True)
class ForwardOnly(GraphPass):
    """Accepts no whole step."""

    name = "forward-only"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.JOINT, Stage.FORWARD})

    def rewrite(self, graph: TrainGraph) -> int:
        raise AssertionError


@dataclass(frozen=True)
class Fail(GraphPass):
    """Spoils the graph, then raises."""

    name = "fail"
    numerics = Numerics.BITWISE

    error: Exception

    def rewrite(self, graph: TrainGraph) -> int:
        graph.set_output(0, None)
        RemoveDetach().rewrite(graph)
        graph.graph.eliminate_dead_code()
        raise self.error


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(model(x.detach())).square().mean()


@pytest.fixture
def step() -> TrainGraph:
    torch.manual_seed(0)
    return capture_train_step(loss_fn, nn.Linear(3, 2), torch.ones(4, 3))


def test_unknown_names() -> None:
    passes = (DeduplicateShared(), PrefetchCollectives())
    message = r"^unknown pass 'prefetch'; this pipeline has: deduplicate-shared, prefetch-collectives$"
    with pytest.raises(UnknownPassError, match=message):
        Pipeline(passes, disable=("deduplicate-shared", "prefetch"))
    with pytest.raises(UnknownPassError, match=message):
        Pipeline(passes, stop_after="prefetch")
    with pytest.raises(UnknownPassError, match=r"^unknown pass 'none'; this pipeline has: deduplicate-shared"):
        default_pipeline(BucketPlan.from_modules([]), disable=("none",))


def test_disable_takes_no_string() -> None:
    message = r"^disable takes a collection of names; write disable=\('remove-detach',\)$"
    with pytest.raises(PipelineError, match=message):
        Pipeline((RemoveDetach(),), disable="remove-detach")


def test_duplicates() -> None:
    with pytest.raises(PipelineError, match=r"^pass 'remove-detach' is in the pipeline 2 times$"):
        Pipeline((RemoveDetach(), Note(), RemoveDetach()))


def test_order() -> None:
    message = r"^pass 'note' must run after 'remove-detach': move it later in the pipeline$"
    with pytest.raises(PipelineError, match=message):
        Pipeline((Note(), RemoveDetach()))
    assert Pipeline((Note(),)).passes  # the other one need not be there
    with pytest.raises(PipelineError, match=r"^pass 'coalesce-grad-reductions' must run after"):
        Pipeline((CoalesceGradReductions(), DeduplicateShared()))


def test_stage(step: TrainGraph) -> None:
    message = r"^pass 'forward-only' \(after remove-detach\) accepts the stages forward, joint; this graph is a step$"
    with pytest.raises(PipelineError, match=message):
        Pipeline((RemoveDetach(), ForwardOnly())).run(step)


def test_report(step: TrainGraph) -> None:
    num_nodes, num_removed = len(step.graph.nodes), len(detaches(step))
    assert num_removed
    result = Pipeline((RemoveDetach(), Note())).run(step)
    assert step.report is None
    report = result.report
    assert report is not None
    removed, noted = report
    assert report["note"] is noted
    assert (removed.name, removed.numerics) == ("remove-detach", Numerics.BITWISE)
    assert removed.num_rewrites == num_removed
    num_left = num_nodes - num_removed
    assert removed.num_nodes == (num_nodes, num_left)
    assert noted.num_nodes == (num_left, num_left)
    assert removed.collectives == ({}, {})
    assert removed.notes == ()
    assert noted.notes == ("layers.0.weight: left alone",)
    assert result.notes == []
    assert removed.seconds > 0
    written = json.loads(json.dumps(noted.to_json()))
    assert written["numerics"] == "rounding"
    assert written["notes"] == ["layers.0.weight: left alone"]


def test_report_prints_as_a_table(step: TrainGraph) -> None:
    report = Pipeline((RemoveDetach(), Note())).run(step).report
    assert report is not None
    assert report.proof.startswith("3 values proved equal in bits, 0 not proved; ms: ")
    timeless = replace(report, passes=tuple(replace(p, seconds=0.0015) for p in report), proof="3 proved")
    num_nodes, num_removed = len(step.graph.nodes), len(detaches(step))
    num_left = num_nodes - num_removed
    assert str(timeless) == (
        "pass           numerics  rewrites  nodes    collectives  ms\n"
        f"remove-detach  bitwise   {num_removed}         {num_nodes} → {num_left}  0 → 0        1.5\n"
        f"note           rounding  0         {num_left} → {num_left}  0 → 0        1.5\n"
        "note: layers.0.weight: left alone\n"
        "proof: 3 proved"
    )


def test_report_counts_collectives() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        before = captured.collectives()
        report = default_pipeline(BucketPlan.from_modules([["layers.0"]])).run(captured).report
    assert before == {"all_gather_into_tensor": 18, "reduce_scatter_tensor": 18}
    assert report["deduplicate-shared"].collectives[0] == before
    assert report["bucket-fsdp-collectives"].collectives[1] == {
        "all_gather_into_tensor": 2,
        "reduce_scatter_tensor": 2,
    }


def test_disable_and_stop_after(step: TrainGraph) -> None:
    passes = (RemoveDetach(), Note(), ForwardOnly())
    names = [r.name for r in Pipeline(passes, disable=("remove-detach", "forward-only")).run(step).report]
    assert names == ["note"]
    names = [r.name for r in Pipeline(passes, stop_after="note").run(step).report]
    assert names == ["remove-detach", "note"]
    assert list(Pipeline(()).run(step).report) == []


def test_stop_after_a_disabled_pass(step: TrainGraph) -> None:
    pipeline = Pipeline((RemoveDetach(), Note(), ForwardOnly()), disable=("note",), stop_after="note")
    assert [r.name for r in pipeline.run(step).report] == ["remove-detach"]


def test_dump(step: TrainGraph, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    Pipeline((RemoveDetach(), Note()), disable=("note",)).run(step, dump=folder)
    Pipeline((RemoveDetach(), Note())).run(step, dump=str(folder))
    written = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    assert list(written) == ["00-captured.py", "01-remove-detach.py", "02-note.py"]
    assert has_detach(written["00-captured.py"])
    assert not has_detach(written["01-remove-detach.py"])
    assert '"f32[4, 3][3, 1]' in written["00-captured.py"]


def test_result_runs_and_original_is_unchanged(step: TrainGraph) -> None:
    code, x = step.module.code, torch.randn(4, 3)
    result = Pipeline((RemoveDetach(),)).run(step)
    assert step.module.code == code != result.module.code
    losses, gradients = [], []
    for graph in (step, result):
        graph.model.zero_grad()
        losses.append(graph(x))
        gradients.append([p.grad for p in graph.model.parameters()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("error", [KeyError("nothing"), UnsupportedError("layers.0 is odd")])
def test_failing_pass(step: TrainGraph, error: Exception) -> None:
    code, x = step.module.code, torch.randn(4, 3)
    names = [node.name for node in step.graph.nodes]
    with pytest.raises(GraphPassesError) as caught:
        Pipeline((RemoveDetachAgain(), Fail(error))).run(step)
    if isinstance(error, KeyError):
        assert type(caught.value) is PipelineError
        assert str(caught.value) == "pass 'fail' (after remove-detach-again) failed: KeyError: 'nothing'"
        assert caught.value.__cause__ is error
    else:
        assert caught.value is error
        assert error.__notes__ == ["raised by pass 'fail' (after remove-detach-again)"]
    assert step.module.code == code
    assert [node.name for node in step.graph.nodes] == names
    step(x)
    expected = loss_fn(step.model, x)
    gradients = torch.autograd.grad(expected, list(step.model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(step.model.parameters(), gradients, strict=True))


@dataclass(frozen=True)
class RemoveDetachAgain(GraphPass):
    """Leaves the graph alone; only its name differs."""

    name = "remove-detach-again"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        return 0


def test_as_function_rewrites_a_raw_graph_module(step: TrainGraph) -> None:
    function = RemoveDetach().as_function(step)
    assert function.__name__ == "remove_detach_pass"
    assert function.__doc__ == "Removes detaches."
    gm = step.copy().module
    placeholders = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert function(gm, (torch.ones(1),)) is gm
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == placeholders
    assert not has_detach(gm.code)
    assert has_detach(step.module.code)
    assert function(gm) is gm  # example inputs are optional


def test_as_function_keeps_repeated_placeholders() -> None:
    with on_fake_ranks(LanguageModel()) as step:
        shrunk = Pipeline((DeduplicateShared(),)).run(step)
        assert len(shrunk.inputs) == len(step.inputs) - 2  # local tensor and mesh of the head
        gm = step.copy().module
        num_placeholders = len(step.inputs)
        for p in (
            DeduplicateShared(),
            CoalesceGradReductions(),
            BucketFSDPCollectives(BucketPlan.from_modules([])),
        ):
            gm = p.as_function(step)(gm)
            assert len(gm.graph.find_nodes(op="placeholder")) == num_placeholders
    assert gm.code.count("reduce_scatter_tensor.default") == 1


def test_as_function_checks_the_result(step: TrainGraph) -> None:
    gm = step.copy().module
    with pytest.raises(PipelineError, match=r"^pass 'fail' failed: ValueError: no$"):
        Fail(ValueError("no")).as_function(step)(gm)
    with pytest.raises(PipelineError, match=r"^pass 'forward-only' accepts the stages forward, joint; this"):
        ForwardOnly().as_function(step)(step.copy().module)


def test_uuid_follows_the_options() -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", Note().uuid())
    assert Note().uuid() == Note().uuid()
    assert len({Note().uuid(), Note("other").uuid(), RemoveDetach().uuid()}) == 3
    assert CanonicalReductions().uuid() != CanonicalReductions(torch.float64).uuid()
    plans = BucketPlan.from_modules([["a"]]), BucketPlan.from_modules([["b"]])
    assert len({BucketFSDPCollectives(plan).uuid() for plan in plans}) == 2


PASS = """
from dataclasses import dataclass
from graphpasses.passes.runner import GraphPass, Numerics
from {package}.helper import count

@dataclass(frozen=True)
class CountThings(GraphPass):
    name = "count-things"
    numerics = Numerics.BITWISE
    def rewrite(self, graph): return count(graph)
"""


def test_uuid_follows_every_source_that_a_pass_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass does its work in functions of other files; a compiler's cache must see them change."""
    uuids = []
    for folder, helper in (("a", "return 1"), ("b", "return 2"), ("c", "return 1")):
        package = tmp_path / folder / "own_passes"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "helper.py").write_text(f"def count(graph): {helper}\n")
        (package / "count_things.py").write_text(PASS.format(package="own_passes"))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(package.parent)
            for name in ("own_passes", "own_passes.helper", "own_passes.count_things"):
                patch.delitem(sys.modules, name, raising=False)
            uuids.append(importlib.import_module("own_passes.count_things").CountThings().uuid())
    assert uuids[0] == uuids[2] != uuids[1]


@pytest.mark.slow
def test_uuid_follows_the_sources_of_graphpasses(tmp_path: Path) -> None:
    """An edited file of graphpasses, here another than the pass's own, gives its passes other digests."""
    copied = tmp_path / "graphpasses"
    shutil.copytree(next(iter(graphpasses.__path__)), copied, ignore=shutil.ignore_patterns("*.pyc.*"))
    helper = copied / "analysis" / "levels.py"
    code = f"""
from graphpasses.passes import PrefetchCollectives
from graphpasses.source_digest import digest_of_sources
print(PrefetchCollectives().uuid())
with open({str(helper)!r}, "a") as helper:
    helper.write("# edited")
digest_of_sources.cache_clear()  # as in another process
print(PrefetchCollectives().uuid())
"""
    run = (sys.executable, "-c", code)
    before, after = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert before == PrefetchCollectives().uuid()
    assert after != before


def test_report_of_an_unknown_pass(step: TrainGraph) -> None:
    report = Pipeline((RemoveDetach(),)).run(step).report
    with pytest.raises(KeyError, match="nothing"):
        report["nothing"]
