"""What a certificate says is taken for granted: also what another than the project says of kernels and operators."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from graphpasses.graph import CapturedStep
from graphpasses.proof.core.operators import AXIOMS, RULES, axiom
from graphpasses.proof.prove import prove
from tests.proof.code import Code, capture_model

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def test_another_module_than_the_graphs_runs(captured: CapturedStep) -> None:
    other = captured.copy()
    other.runs_as = lambda module: module
    assert prove(captured, other).unproved == (
        ("the graph", "another module than the graph's runs (runs_as), into which no rule looks"),
    )


def test_kernels_are_named_and_stand_for_nothing_else(captured: CapturedStep) -> None:
    class Kernels:
        def __init__(self, axiom: str) -> None:
            self.axiom = axiom

        def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
            return module

    other = captured.copy()
    other.runs_as = Kernels("views")
    assert not prove(captured, other)
    other.runs_as = Kernels("exact kernels")
    certificate = prove(captured, other)
    assert certificate
    assert "exact kernels" in certificate.axioms


def test_an_axiom_of_another_is_named(captured: CapturedStep) -> None:
    code = Code(captured)
    step = code.finished(code.sum_default(code.relu_default(code.x)))
    other = step.copy()
    (relu,) = other.graph.find_nodes(op="call_function", target=aten.relu.default)
    other.replace(relu, relu.args[0])  # type: ignore[arg-type]
    assert prove(step, step.copy())
    axiom("wrong", "relu returns what it is given", aten.relu.default)(lambda values, result, x: x)
    try:
        assert prove(step, other).axioms["wrong"] == "relu returns what it is given"
    finally:
        del AXIOMS["wrong"], RULES[aten.relu.default]
