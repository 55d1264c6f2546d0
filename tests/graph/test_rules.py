"""Each rule of a legal graph, and a graph that breaks it; passes that break them are in ``test_verification.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.errors import PipelineError
from graphpasses.graph import (
    WAIT,
    CapturedStep,
    DynamoGraph,
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    Stage,
    TrainGraph,
    argument,
)
from graphpasses.graph.known_values import KnownValues
from graphpasses.graph.rules import FORM, RULES, Verifier
from graphpasses.identity import IdentityMap
from tests.helpers.models import Even, on_fake_ranks

aten = torch.ops.aten
BY_NAME = {rule.__name__[1:].replace("_", "-"): rule for rule in (*FORM, *RULES)}


@pytest.fixture
def step() -> Iterator[CapturedStep]:
    with on_fake_ranks(Even()) as graph:
        yield graph


def make(stage: Stage, kinds: Sequence[InputKind], outputs: Sequence[OutputKind] = ()) -> TrainGraph:
    """A graph of a sine of its first input, with an input of each kind."""
    module = make_fx(lambda *xs: [xs[0].sin()], tracing_mode="fake")(*[torch.ones(2) for _ in kinds])
    model = nn.Module()
    for name in ("a", "b", "other"):
        model.register_buffer(name, torch.ones(2))
    fields = {
        "module": module,
        "inputs": tuple(map(GraphInput, kinds, ("a", "b"))),
        "outputs": tuple(map(GraphOutput, outputs or [OutputKind.VALUE])),
        "identity": IdentityMap.of(model),
        "parameters": {},
        "model": model,
        "stage": stage,
    }
    return DynamoGraph(**fields, live=(None,) * len(kinds)) if stage is Stage.DYNAMO else TrainGraph(**fields)


def broken(name: str, graph: TrainGraph, edit: Callable[[TrainGraph], object] = lambda _: None) -> list[str]:
    """What a rule says of a graph after an edit; before it, the graph is legal, unless the edit is none."""
    verifier = Verifier(graph)
    edit(graph)
    return [each.message for each in BY_NAME[name](verifier)]


def first(graph: TrainGraph, target: object) -> fx.Node:
    return graph.graph.find_nodes(op="call_function", target=target)[0]


def test_every_rule_says_what_it_is_in_one_sentence_and_is_broken_here() -> None:
    names = list(BY_NAME)
    assert len(names) == len(FORM) + len(RULES)
    for name, rule in BY_NAME.items():
        doc = rule.__doc__
        assert doc
        assert doc.endswith(".")
        assert doc.count("\n") == 0
        assert any(test.startswith(f"test_{name.replace('-', '_')}") for test in globals()), name


def test_a_captured_step_is_legal(step: CapturedStep) -> None:
    verifier = Verifier(step)
    verifier.known = KnownValues()
    for rule in (*FORM, *RULES):
        assert list(rule(verifier)) == [], rule


@pytest.mark.parametrize("stage", [Stage.STEP, Stage.DYNAMO])
def test_well_formed(stage: Stage) -> None:
    graph = make(stage, [InputKind.PARAMETER])
    assert broken("well-formed", graph) == []

    def read_before(graph: TrainGraph) -> None:
        (x,) = graph.placeholders
        x.prepend(first(graph, aten.sin.default))

    (message,) = broken("well-formed", graph, read_before)
    assert re.match(r"left a malformed graph: Argument 'arg0_1' of Node 'sin' was used before it", message)
    assert "\n" not in message


def test_well_formed_after_an_insertion_before_an_erased_node() -> None:
    """fx's own check does not see it, but what walks a graph from its end does not meet the new node."""

    def insert(graph: TrainGraph) -> None:
        sin = first(graph, aten.sin.default)
        with graph.graph.inserting_before(sin):
            cos = graph.emit(aten.cos.default, sin.args, like=sin)
            graph.replace(sin, cos)
            graph.emit(aten.tan.default, (cos,), like=cos)

    assert broken("well-formed", make(Stage.STEP, [InputKind.PARAMETER]), insert) == [
        "left a malformed graph: a node was inserted before one that was erased"
    ]


def test_described(step: CapturedStep) -> None:
    def drop(graph: TrainGraph) -> None:
        graph.inputs = graph.inputs[:-1]

    inputs, outputs = len(step.inputs), len(step.outputs)
    assert broken("described", step, drop) == [
        f"left {inputs} placeholders and {outputs} outputs; the step describes {inputs - 1} and {outputs}"
    ]


def test_loss(step: CapturedStep) -> None:
    assert broken("loss", step, lambda graph: graph.set_output(0, None)) == ["removed the loss"]


def renamed(graph: TrainGraph, kind: InputKind) -> None:
    graph.inputs = tuple(replace(item, fqn="other") if item.kind is kind else item for item in graph.inputs)


def test_same_inputs() -> None:
    graph = make(Stage.STEP, [InputKind.BUFFER])
    assert broken("same-inputs", graph, lambda graph: renamed(graph, InputKind.BUFFER)) == [
        "changed the step's inputs: lost a; gained other"
    ]


def test_same_batch() -> None:
    graph = make(Stage.STEP, [InputKind.BATCH, InputKind.BATCH])

    def swap(graph: TrainGraph) -> None:
        graph.inputs = graph.inputs[::-1]

    order = "changed the step's batch inputs: expected the order a, b, got "
    assert broken("same-batch", graph, swap) == [f"{order}b, a"]
    assert broken("same-batch", graph, lambda graph: renamed(graph, InputKind.BATCH))[0] == (
        "changed the step's batch inputs: lost a, b; gained other"
    )


def test_same_gradients(step: CapturedStep) -> None:
    slot = step.gradient_slots()["layers.1.weight"][0]
    assert broken("same-gradients", step, lambda graph: graph.set_output(slot, None)) == [
        "changed the step's gradients: lost layers.1.weight"
    ]


def test_fixed_signature() -> None:
    graph = make(Stage.STEP, [InputKind.PARAMETER, InputKind.PARAMETER])
    graph.fixed_signature = True
    assert broken("fixed-signature", graph, lambda graph: graph.remove_inputs([1])) == [
        "left 1 placeholders of 2; another runner passes them all (fixed_signature)"
    ]


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_what_goes_by_its_place_stays_what_it_is(kind: str) -> None:
    """The proof compares values by what inputs and outputs are said to be."""
    graph = make(Stage.JOINT, [InputKind.VALUE, InputKind.VALUE])
    graph.outputs = (replace(graph.outputs[0], fqn="a"),)

    def rename(graph: TrainGraph) -> None:
        first, *others = getattr(graph, kind)
        setattr(graph, kind, (replace(first, fqn=f"{first.fqn} or b"), *others))

    assert broken("fixed-signature", graph, rename) == []
    graph.fixed_signature = True
    assert broken("fixed-signature", graph, rename) == [
        f"says of {kind[:-1]} 0 that it is value 'a or b or b', which is value 'a or b'; these go by their places"
    ]


def test_gradient_like_parameter(step: CapturedStep) -> None:
    slot = step.gradient_slots()["emb.weight"][0]
    value = step.output_values[0]
    (message,) = broken("gradient-like-parameter", step, lambda graph: graph.set_output(slot, value))
    assert message.startswith(f"left {value.name} as the gradient of 'emb.weight': expected ((")
    assert message.endswith(", got ((), torch.float32, device(type='cpu'))")


def test_kinds_of_stage() -> None:
    legal = {
        Stage.STEP: [
            InputKind.BATCH,
            InputKind.OPTIMIZER_STATE,
            InputKind.HYPERPARAMETER,
            InputKind.UNREDUCED,
        ],
        Stage.DYNAMO: [InputKind.VALUE],
        Stage.JOINT: [InputKind.VALUE, InputKind.TANGENT],
        Stage.FORWARD: [InputKind.VALUE],
        Stage.BACKWARD: [InputKind.VALUE, InputKind.TANGENT],
    }
    for stage, of_stage in legal.items():
        for kind in InputKind:
            expected = (
                []
                if kind in (*of_stage, InputKind.PARAMETER, InputKind.BUFFER)
                else [f"left the {kind.value} input a; a {stage.value} graph has none"]
            )
            assert broken("kinds-of-stage", make(stage, [kind])) == expected
    graph = make(Stage.JOINT, [InputKind.VALUE], [OutputKind.LOSS])
    assert broken("kinds-of-stage", graph) == ["left a loss as output 0; a joint graph has none"]


def test_operators() -> None:
    def call_method(graph: TrainGraph) -> None:
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.graph.call_method("sin", (graph.placeholders[0],))

    assert broken("operators", make(Stage.FORWARD, [InputKind.VALUE]), call_method) == [
        "left sin_1, a call_method, in a forward graph, which calls operators"
    ]
    assert broken("operators", make(Stage.DYNAMO, [InputKind.VALUE]), call_method) == []


def test_live_inputs() -> None:
    graph = make(Stage.DYNAMO, [InputKind.VALUE])
    assert broken("live-inputs", graph) == []

    def forget(graph: DynamoGraph) -> None:
        graph.live = ()

    assert broken("live-inputs", graph, forget) == ["left 0 live values for 1 inputs; add them with add_input"]
    message = r"^the pass rewrites what Dynamo traced, a DynamoGraph; it was given a TrainGraph of the stage step$"
    with pytest.raises(PipelineError, match=message):
        DynamoGraph.of(make(Stage.STEP, [InputKind.BATCH]))


def test_one_wait(step: CapturedStep) -> None:
    def wait_twice(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        with graph.graph.inserting_before(wait):
            graph.emit(WAIT, wait.args, like=wait)

    assert broken("one-wait", step, wait_twice) == [
        "left collective all_gather_into_tensor with 2 waits and 0 other users; expected exactly one wait"
    ]


def test_sizes_of_what_will_come_may_be_read(step: CapturedStep) -> None:
    def read_size(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        with graph.graph.inserting_before(wait):
            size = graph.emit(torch.ops.aten.sym_size.int, (argument(wait), 0), like=wait)
            graph.emit(torch.ops.aten.zeros.default, ([size],), like=wait)

    assert not broken("one-wait", step, read_size)


def test_wait_of_wait(step: CapturedStep) -> None:
    def wait_again(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        with graph.graph.inserting_after(wait):
            graph.emit(WAIT, (wait,), like=wait)

    assert not broken("wait-of-collective", step, wait_again)


def test_wait_of_collective(step: CapturedStep) -> None:
    def wait_for_input(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        wait.replace_input_with(argument(wait), graph.placeholders[0])

    (message,) = broken("wait-of-collective", step, wait_for_input)
    assert message == f"left wait_tensor waiting for {step.placeholders[0]}, not a collective"


@pytest.mark.parametrize("stage", Stage)
def test_no_new_writes(stage: Stage) -> None:
    def write(graph: TrainGraph) -> None:
        (x,) = graph.placeholders
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.emit(aten.add_.Tensor, (x, 1), like=x)

    graph = make(stage, [InputKind.PARAMETER])
    message = f"left aten.add_.Tensor writing in place, which a {stage.value} graph did not do before"
    assert broken("no-new-writes", graph, write) == [message] * (stage in (Stage.STEP, Stage.JOINT))
    assert broken("no-new-writes", graph) == []  # captured with it: other calls of it may come and go


def test_true_values(step: CapturedStep) -> None:
    def shrink(graph: TrainGraph) -> None:
        mm = first(graph, aten.mm.default)
        mm.meta["val"] = mm.meta["val"][:1]

    messages = broken("true-values", step, shrink)
    assert messages[0].startswith("left mm with meta['val'] ((1, ")
    assert broken("true-values", step) == []
