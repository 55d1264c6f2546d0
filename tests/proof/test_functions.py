"""Calls of functions, beside operators: what they set, write or draw that their names, or their nodes, do not say."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.amp import autocast_mode

from graphpasses.graph import CapturedStep
from graphpasses.proof.prove import prove
from tests.proof.code import Case, Code, Make, answer, capture_model, check

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


# ---- what is set for the calls after it ---------------------------------------------------------------------------


def product(*functions: tuple[Any, ...]) -> Make:
    """Calls functions that the graph does not run now, and multiplies."""

    def make(code: Code) -> fx.Node:
        for function, *args in functions:
            with code.step.graph.inserting_before(code.step.graph.output_node()):
                code.step.graph.call_function(function, (*args,)).meta["val"] = None
        return code.sum_default(code.mm_default(code.x, code.weight))

    return make


@pytest.mark.parametrize(
    "call",
    [
        (autocast_mode._enter_autocast, "cpu", torch.bfloat16, True, None),
        (torch.set_flush_denormal, True),
        (torch.manual_seed, 1),
        (torch.set_default_dtype, torch.float64),
        (torch.use_deterministic_algorithms, True),
    ],
)
def test_what_holds_for_all_calls_after_it(captured: CapturedStep, call: tuple[Any, ...]) -> None:
    assert answer(captured, product(), product(call)) == "not proved"
    assert answer(captured, product(), product((math.sqrt, 2.0))) == "proved"


def test_what_does_not_say_what_it_returns(captured: CapturedStep) -> None:
    def step(function: Callable[..., Any], says: bool) -> CapturedStep:
        code = Code(captured)
        with code.step.graph.inserting_before(code.step.graph.output_node()):
            node = code.step.graph.call_function(function, (code.x,))
        if says:
            node.meta["val"] = code.x.meta["val"]
        return code.step

    assert not prove(captured, step(torch.relu, says=False))
    assert prove(captured, step(torch.relu, says=True))


# ---- what is written ----------------------------------------------------------------------------------------------


def with_copy(change: Callable[[Code, fx.Node], object] | None) -> Make:
    def make(code: Code) -> fx.Node:
        copy = code.clone_default(code.x)
        if change is not None:
            change(code, copy)
        return code.tanh_default(copy)

    return make


def assigned(code: Code, node: fx.Node) -> fx.Node:
    return code.call(torch.Tensor.data.__set__, node, code.mul_Tensor(code.x, 2.0))  # type: ignore[attr-defined]


def test_functions_that_write(captured: CapturedStep) -> None:
    writes: dict[str, Callable[[Code, fx.Node], object]] = {
        "by another name": lambda code, node: code.call(operator.call, aten.add_.Tensor, node, 1.0),
        "assigned data": assigned,
        "an assigned attribute": lambda code, node: code.call(setattr, node, "data", code.mul_Tensor(code.x, 2.0)),
    }
    for name, write in writes.items():
        reads = with_copy(lambda code, node: code.call(getattr, node, "data"))
        check(captured, Case(name, with_copy(None), with_copy(write), reads))


def test_a_method_of_what_the_graph_does_not_show(captured: CapturedStep) -> None:
    method = torch.zeros(3).add_
    with_method = with_copy(lambda code, node: code.call(method, 1.0))
    assert answer(captured, with_copy(None), with_method) != "proved"
    assert answer(captured, with_method, with_method) == "proved"


def test_a_result_for_which_there_is_no_room(captured: CapturedStep) -> None:
    """Torch gives a tensor that is too small for its result another shape, and other memory."""

    def summed(size: int, is_late: bool) -> Make:
        def make(code: Code) -> fx.Node:
            out = code.zeros_default([size], device="cpu")
            total = None if is_late else code.sum_default(out)
            code.call(aten.mul.out, code.view_default(code.x, [64]), 2.0, out=out)
            return total or code.sum_default(out)

        return make

    assert answer(captured, summed(0, is_late=False), summed(0, is_late=True)) == "not proved"
    assert answer(captured, summed(64, is_late=True), summed(64, is_late=True)) == "proved"
    assert answer(captured, summed(64, is_late=False), summed(64, is_late=True)) == "differs"
