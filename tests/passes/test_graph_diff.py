"""Graph diffs: what went, came and moved is marked, and places that look alike are one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.graph.pass_report import Hunk, PassReport
from graphpasses.passes import default_pipeline
from graphpasses.passes.graph_diff import diff_lines, read_lines
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.models import LanguageModel, on_fake_ranks

aten = torch.ops.aten


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.gain
        for _ in range(4):
            y = y.sin().cos().exp().tanh().sigmoid()
        return y.sum()


@pytest.fixture
def step() -> TrainGraph:
    return capture_train_step(lambda model, x: model(x), Sines(), torch.ones(3))


def nodes(step: TrainGraph, target: object) -> list[fx.Node]:
    return step.graph.find_nodes(op="call_function", target=target)


def changed(hunk: Hunk) -> list[str]:
    return [line for line in (*hunk.before, *hunk.after) if line[0] in "-+~"]


def test_unchanged(step: TrainGraph) -> None:
    assert diff_lines(read_lines(step), read_lines(step)) == ((), 0)


def test_lines_tell_operator_arguments_shape_and_parameter(step: TrainGraph) -> None:
    texts = [line.text for line in read_lines(step)]
    assert texts[0] == "arg0_1 = placeholder  # float32[3], of gain"
    assert "mul = aten.mul.Tensor(arg1_1, arg0_1)  # float32[3], of batch[0], of gain" in texts
    assert texts[-1] == "return [sum_1, mul_13]"


def test_a_new_node_and_its_reader(step: TrainGraph) -> None:
    before = read_lines(step)
    mul = nodes(step, aten.mul.Tensor)[0]
    (reader,) = (user for user in mul.users if user.target is aten.sin.default)
    with step.graph.inserting_after(mul):
        relu = step.graph.call_function(aten.relu.default, (mul,))
    reader.update_arg(0, relu)
    ((hunk,), num_left_out) = diff_lines(before, read_lines(step))
    assert num_left_out == 0
    assert hunk.num_alike == 1
    assert changed(hunk) == [
        "- sin = aten.sin.default(mul)  # float32[3]",
        "+ relu_default = aten.relu.default(mul)",
        "+ sin = aten.sin.default(relu_default)  # float32[3]",
    ]
    assert hunk.before[0][0] == " "  # there are lines around it
    assert hunk.before[:2] == hunk.after[:2]


def test_places_that_look_alike_are_one(step: TrainGraph) -> None:
    before = read_lines(step)
    for node in nodes(step, aten.exp.default):
        with step.graph.inserting_after(node):
            step.graph.call_function(aten.relu.default, (node,))
    ((hunk,), _) = diff_lines(before, read_lines(step))
    assert hunk.num_alike == 4
    assert changed(hunk) == ["+ relu_default = aten.relu.default(exp)"]


def test_what_moves_is_marked(step: TrainGraph) -> None:
    before = read_lines(step)
    last = nodes(step, aten.sin.default)[0]
    nodes(step, aten.tanh.default)[-1].append(last)  # not well-formed, but moved
    found, _ = diff_lines(before, read_lines(step))
    assert [changed(each) for each in found] == [["~ sin = aten.sin.default(mul)  # float32[3]"]] * 2
    assert [line for line in found[0].after if line[0] == "~"] == []
    assert [line for line in found[1].before if line[0] == "~"] == []


def test_very_much_is_cut(step: TrainGraph) -> None:
    before = read_lines(step)
    mul = nodes(step, aten.mul.Tensor)[0]
    with step.graph.inserting_after(mul):
        for _ in range(100):
            step.graph.call_function(aten.cat.default, ([mul] * 100,))
    ((hunk,), _) = diff_lines(before, read_lines(step))
    assert len(hunk.after) == 41
    assert "… 64 more lines" in hunk.after
    assert max(map(len, hunk.after)) == 163


def test_very_many_are_counted() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    chain = [x]
    for _ in range(400):
        chain.append(graph.call_function(aten.sin.default, (chain[-1],)))
    graph.output(chain[-1])

    class Step:
        def __init__(self) -> None:
            self.graph, self.placeholders, self.inputs = graph, [], ()

    before = read_lines(Step())
    for index in range(40):  # each place with another number of new nodes
        with graph.inserting_after(chain[10 * index + 5]):
            for _ in range(index + 1):
                graph.call_function(aten.relu.default, (x,))
    found, num_left_out = diff_lines(before, read_lines(Step()))
    assert len(found) == 30
    assert num_left_out == 10


@dataclass(frozen=True)
class RemoveDetach(GraphPass):
    """Removes detaches."""

    name = "remove-detach"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        found = nodes(graph, aten.sigmoid.default)
        for node in found:
            node.replace_all_uses_with(node.args[0])
        return len(found)


def test_a_pipeline_reports_them_if_asked(step: TrainGraph) -> None:
    pipeline = Pipeline((RemoveDetach(),))
    assert [each.graph_diff for each in pipeline.run(step, prove=False).report] == [()]
    (report,) = pipeline.run(step, graph_diff=True, prove=False).report
    assert report.graph_diff
    assert PassReport.from_json(report.to_json()) == report
    reports: list[PassReport] = []
    copy = step.copy()
    RemoveDetach().as_function(copy, reports, graph_diff=True)(copy.module)
    assert reports[0].graph_diff == report.graph_diff


def test_layers_of_a_model_look_alike() -> None:
    """Every rewrite is shown, and there are as many hunks for six layers as for three."""
    counts = []
    for num_blocks in (3, 6):
        with on_fake_ranks(LanguageModel(num_blocks=num_blocks)) as captured:
            plan = BucketPlan.from_modules([[f"layers.{index}"] for index in range(num_blocks)])
            report = default_pipeline(plan).run(captured, graph_diff=True, prove=False).report
        counts.append([len(each.graph_diff) for each in report])
        assert [each.num_left_out for each in report] == [0] * len(report.passes)
        bucketed = report["bucket-fsdp-collectives"]
        assert sum(each.num_alike for each in bucketed.graph_diff) > len(bucketed.graph_diff)
    assert counts[0] == counts[1]
