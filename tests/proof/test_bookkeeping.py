"""What a pass changes beside the graph, so that it computes other bits or another step runs, is never proved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphpasses as gp
from graphpasses.capture import capture_train_step
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep, OutputKind, TrainGraph
from graphpasses.proof.prove import prove


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept + 1.0
        return self.two(self.one(x)).square().mean()


def capture(optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **given: Any) -> CapturedStep:
    model = Counts()
    given |= {} if optimizer is None else {"optimizer": optimizer(model.parameters())}
    return capture_train_step(lambda model, x: model(x), model, torch.ones(2, 4), check=False, **given)


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture(torch.optim.AdamW, clip_norm=1.0)


@pytest.fixture(scope="module")
def other() -> CapturedStep:
    return capture(torch.optim.AdamW, clip_norm=1.0)


def why_not(before: CapturedStep, after: CapturedStep) -> str:
    certificate = prove(before, after)
    return "" if certificate else certificate.unproved[0][1]


@pytest.mark.parametrize(
    "name", ["snapshot", "left_values", "batch_structure", "model", "hook_order", "varying", "carried", "returned"]
)
def test_what_reads_and_leaves_values_is_another(captured: CapturedStep, other: CapturedStep, name: str) -> None:
    step = captured.copy()
    made = {"hook_order": ("two.weight",), "varying": {"batch[0]": {0: None}}, "carried": None, "returned": None}
    setattr(step, name, made[name] if name in made else getattr(other, name))
    is_equal = getattr(step, name) == getattr(captured, name)
    assert why_not(captured, step) == ("" if is_equal else _reason(name))


def _reason(name: str) -> str:
    return f"the step's {name} is another than it was, into which no rule looks"


def test_what_decides_no_bits_may_be_another(captured: CapturedStep) -> None:
    step = captured.copy()
    step.note("a rewrite was skipped")
    step.record_rewrite(lambda step: step)
    step.check_every, step.written = 3, step.written | {"one.weight"}  # whose memory is looked at, too
    assert why_not(captured, step) == ""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clip_norm", lambda update, other: replace(update, clip_norm=2.0)),
        ("optimizers", lambda update, other: replace(update, facts=other.facts)),
        ("replaced", lambda update, other: replace(update, replaced=(("one.weight", "exp_avg"),))),
    ],
)
def test_an_update_that_is_another(
    captured: CapturedStep, other: CapturedStep, name: str, change: Callable[[Any, Any], Any]
) -> None:
    step = captured.copy()
    assert why_not(captured, step) == ""
    step.update = change(step.update, other.update)
    assert why_not(captured, step) == _reason(f"update.{name}")


def test_a_gradient_that_nothing_applies_is_lost(captured: CapturedStep) -> None:
    step = captured.copy()
    step.outputs = tuple(replace(item, is_applied=item.is_gradient) for item in step.outputs)
    with pytest.raises(ProofError, match=r"changes the gradient of 'one\.weight' .*: it is lost"):
        prove(captured, step)


def doubles(module: fx.GraphModule, given: Any) -> tuple[Tensor, ...]:
    return tuple(each * 2 for each in given)


def unwritten(body: list[str]) -> list[str]:
    return [line.replace("add", "sub") for line in body]


@pytest.mark.parametrize("of_update", [False, True])
def test_a_module_that_runs_more_than_its_graph(captured: CapturedStep, of_update: bool) -> None:
    name = "update.module" if of_update else "module"

    def module_of(step: CapturedStep) -> fx.GraphModule:
        assert step.update is not None
        return step.update.module if of_update else step.module

    hooked, written = captured.copy(), captured.copy()
    module_of(hooked).register_forward_pre_hook(doubles)
    module_of(written).graph.on_generate_code(lambda _: unwritten)
    for step in (hooked, written):
        assert why_not(captured, step) == _reason(f"{name}, which has hooks or code of its own,")


# ---- passes -------------------------------------------------------------------------------------------------------


def run(step: CapturedStep, change: Callable[[Any], object], numerics: gp.Numerics) -> CapturedStep:
    class Changes(gp.GraphPass):
        name = "changes"

        def rewrite(self, graph: TrainGraph) -> int:
            change(graph)
            return 1

    Changes.numerics = numerics
    return gp.Pipeline((Changes(),)).run(step)


def sets_something(graph: TrainGraph) -> None:
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    with graph.graph.inserting_before(first):
        graph.graph.call_function(enter, ()).meta["val"] = None
    fx.node.has_side_effect(enter)  # else nobody reads it, and it goes


def enter() -> None:
    pass


enter.__module__ = "torch.surroundings"


def test_a_pass_that_may_round_changes_nothing_else(captured: CapturedStep) -> None:
    assert run(captured, lambda step: step.note("nothing"), gp.Numerics.ROUNDING)
    with pytest.raises(ProofError, match=r"^pass .changes. makes the step.s hook_order another, which is no"):
        run(captured, lambda step: setattr(step, "hook_order", ("two.weight",)), gp.Numerics.ROUNDING)
    with pytest.raises(ProofError, match=r"^pass .changes. sets .* for the calls after it, where it was nothing"):
        run(captured, sets_something, gp.Numerics.ROUNDING)


def test_random_numbers_that_a_pass_draws_are_not_drawn_by_the_step(captured: CapturedStep) -> None:
    before = torch.get_rng_state()
    run(captured, lambda step: torch.rand(3), gp.Numerics.BITWISE)
    assert torch.equal(torch.get_rng_state(), before)


# ---- what is returned, and what is left ---------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.kept = x * 2.0
        return (self.weight * x).sum(), x * 2.0, x * 2.0


def places(step: CapturedStep, kind: OutputKind) -> list[int]:
    return [index for index, item in enumerate(step.outputs) if item.kind is kind]


@pytest.mark.parametrize("kind", [OutputKind.LEFT, OutputKind.RETURNED])
def test_what_is_returned_is_nothing_else(kind: OutputKind) -> None:
    """Who writes it in place would write the buffer, or another result."""
    x = torch.arange(4.0)
    step = capture_train_step(lambda model, x: model(x), Returns(), x, check=False)
    other = step.copy()
    place, *_ = places(step, OutputKind.RETURNED)
    *_, value = (other.output_values[index] for index in places(step, kind))
    other.set_output(place, value)
    assert " lies in the memory of " in f" {why_not(step, other)}"
    _, first, second = other(x)
    first.add_(1.0)
    assert torch.equal(first, second if kind is OutputKind.RETURNED else other.model.kept)
    with other.graph.inserting_before(other.graph.output_node()):
        other.set_output(place, other.emit(torch.ops.aten.clone.default, (value,), like=value))
    assert why_not(step, other) == ""
