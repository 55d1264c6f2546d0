"""What a step checks is checked by what a pass makes of it: of the same values, with the same words, at its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

import graphpasses as gp
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep, TrainGraph
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.proof.steps import calls

aten = torch.ops.aten
CHECK = aten._assert_async.msg


class Model(nn.Module):
    """Checks what it makes, before and after it writes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if torch.isnan(x).any():
            raise ValueError("not a number")
        x = self.norm(x)
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return self.linear(x).square().mean()


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    model, batch = Model(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gp.capture_train_step(lambda model, x: model(x), model, batch, optimizer=optimizer)


@dataclass(frozen=True)
class Does(GraphPass):
    """Does to a graph what a function does."""

    name = "does"
    numerics = Numerics.BITWISE

    change: Callable[[TrainGraph], None]

    def rewrite(self, graph: TrainGraph) -> int:
        self.change(graph)
        return 1


def emit(graph: TrainGraph, before: fx.Node, target: object, *args: object) -> fx.Node:
    with graph.graph.inserting_before(before):
        return graph.emit(target, args, like=before)


def dropped(graph: TrainGraph) -> None:
    graph.graph.erase_node(calls(graph, CHECK)[1])


def weakened(graph: TrainGraph) -> None:
    check = calls(graph, CHECK)[1]
    (finite,) = check.all_input_nodes[0].all_input_nodes
    check.replace_input_with(check.all_input_nodes[0], emit(graph, check, aten.any.default, finite))


def always_true(graph: TrainGraph) -> None:
    check = calls(graph, CHECK)[0]
    check.replace_input_with(check.all_input_nodes[0], emit(graph, check, aten.ones_like.default, *check.args[:1]))


def of_other_words(graph: TrainGraph) -> None:
    one, other = calls(graph, CHECK)
    one.args = (one.args[0], other.args[1])


def after_a_write(graph: TrainGraph) -> None:
    calls(graph, aten.native_batch_norm.default)[0].append(calls(graph, CHECK)[0])


def before_a_write(graph: TrainGraph) -> None:
    (added,) = calls(graph, aten.add_.Tensor)
    calls(graph, CHECK)[1].append(added)


WRONG = {
    dropped: r"changes the check 'loss_fn raises an error at .*test_checks.py:\d+ .*: it is lost",
    weakened: "changes the check 'loss_fn .*: it is lost",
    always_true: "changes the check 'loss_fn .*: it is lost",
    of_other_words: r"changes the check 'loss_fn .*: it is lost",
    after_a_write: "changes the check 'loss_fn .*: another write of .*buffer norm.running_var is before or after it",
    before_a_write: "changes the check 'loss_fn .*: another write of buffer norm.num_batches_tracked is before or",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_check_that_is_made_otherwise_is_refused(step: CapturedStep, change: Callable[[TrainGraph], None]) -> None:
    with pytest.raises(ProofError, match=rf"^pass 'does' {WRONG[change]}"):
        Pipeline((Does(change),)).run(step)


def repeated(graph: TrainGraph) -> None:
    """The second is of the same, and raises where the first has."""
    check = calls(graph, CHECK)[0]
    emit(graph, graph.graph.output_node(), CHECK, check.args[0], "of other words")


def made_of_a_copy(graph: TrainGraph) -> None:
    check = calls(graph, CHECK)[0]
    check.replace_input_with(check.all_input_nodes[0], emit(graph, check, aten.clone.default, check.args[0]))


def merged(graph: TrainGraph) -> None:
    graph.graph.erase_node(calls(graph, CHECK)[-1])


@pytest.mark.parametrize("change", [repeated, made_of_a_copy])
def test_check_of_the_same_is_proved(step: CapturedStep, change: Callable[[TrainGraph], None]) -> None:
    report = Pipeline((Does(change),)).run(step, prove=True).report
    assert report is not None
    assert report.certificate
    assert sum(name.startswith("the check 'loss_fn") for name in report.certificate.proved) == 2


def test_equal_checks_are_merged(step: CapturedStep) -> None:
    twice = step.copy()
    repeated(twice)
    assert len(calls(twice, CHECK)) == 3
    assert gp.prove(twice, Pipeline((Does(merged),)).run(twice, prove=True))


def test_values_of_checks_are_fake(step: CapturedStep) -> None:
    """A real one has any bits: a pass that touches a check had it run on these."""
    assert all(type(node.meta.get("val")) is not torch.Tensor for node in step.graph.nodes)


@dataclass(frozen=True)
class Rounds(Does):
    """Says that it may round."""

    name = "rounds"
    numerics = Numerics.ROUNDING


def drawn_for_a_rounded_value(graph: TrainGraph) -> None:
    (drawn, _) = calls(graph, aten.rand_like.default)
    (given,) = drawn.all_input_nodes
    drawn.replace_input_with(given, emit(graph, drawn, aten.mul.Tensor, given, 1.001))


def drawn_once_more(graph: TrainGraph) -> None:
    (drawn, _) = calls(graph, aten.rand_like.default)
    emit(graph, drawn, aten.rand_like.default, *drawn.args)


def drawn_otherwise(graph: TrainGraph) -> None:
    (drawn, _) = calls(graph, aten.rand_like.default)
    graph.replace(drawn, emit(graph, drawn, aten.randn_like.default, *drawn.args))


@pytest.mark.parametrize("change", [drawn_for_a_rounded_value, drawn_once_more, drawn_otherwise])
def test_who_may_round_draws_the_same_numbers(change: Callable[[TrainGraph], None]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y * torch.rand_like(y) * torch.rand_like(y)).sum()

    step = gp.capture_train_step(loss_fn, nn.Linear(4, 1), torch.ones(3, 4), check=False)
    if change is drawn_for_a_rounded_value:
        assert Pipeline((Rounds(change),)).run(step).report is not None
        return
    with pytest.raises(ProofError, match=r"^pass 'rounds' draws other random numbers"):
        Pipeline((Rounds(change),)).run(step)
