"""Which nodes belong to backward."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from graphpasses.analysis.backward import backward_nodes, is_backward, tangents
from graphpasses.graph import GraphInput, GraphOutput, InputKind, OutputKind, Stage, TrainGraph
from graphpasses.identity import IdentityMap


def make(stage: Stage, kind: InputKind) -> TrainGraph:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x + 1
        return z, y * z

    model = torch.nn.Module()
    return TrainGraph(
        module=fx.symbolic_trace(step),
        inputs=(GraphInput(InputKind.VALUE, "x"), GraphInput(kind, "y")),
        outputs=(GraphOutput(OutputKind.VALUE), GraphOutput(OutputKind.VALUE)),
        identity=IdentityMap.of(model),
        parameters={},
        model=model,
        stage=stage,
    )


def test_tangents_begin_the_backward_of_a_joint_graph() -> None:
    graph = make(Stage.JOINT, InputKind.TANGENT)
    assert {node.name for node in tangents(graph)} == {"y"}
    assert {node.name for node in backward_nodes(graph)} == {"y", "mul", "output"}


def test_other_dependencies_than_inputs_count_if_given() -> None:
    graph = make(Stage.JOINT, InputKind.TANGENT)
    x, y, add, mul, output = graph.graph.nodes
    needed = {x: [], y: [], add: [x, y], mul: [y, add], output: [add, mul]}
    assert backward_nodes(graph, needed) == {y, add, mul, output}


def test_autograd_marks_the_backward_of_a_whole_step() -> None:
    graph = make(Stage.STEP, InputKind.BATCH)
    assert backward_nodes(graph) == set()
    (mul,) = graph.graph.find_nodes(op="call_function", target=operator.mul)
    mul.meta["autograd_backward"] = True
    assert backward_nodes(graph) == {mul}
    assert is_backward(mul)
