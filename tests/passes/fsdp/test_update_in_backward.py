"""Updates move behind their gradients, and behind all that reads their parameters; what cannot be cut stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.optim import SGD, AdamW, Optimizer, Rprop

from graphpasses import Pipeline, capture_train_step
from graphpasses.errors import CaptureError, PipelineError, ProofError
from graphpasses.graph import CapturedStep, Stage, TrainGraph
from graphpasses.passes import DeduplicateShared, UpdateInBackward, default_pipeline
from graphpasses.passes.runner import GraphPass, Numerics
from tests.helpers.models import LanguageModel, next_token_loss, same_bits, token_batch

NAME = "update-in-backward"
X = torch.ones(3, 4)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def capture(model: nn.Module, optimizer: Optimizer, **options: Any) -> CapturedStep:
    return capture_train_step(loss_fn, model, X, optimizer=optimizer, **options)


def run(step: CapturedStep, num_bytes: int = 1) -> tuple[int, tuple[str, ...], CapturedStep]:
    result = Pipeline((UpdateInBackward(num_bytes),)).run(step, prove=True)
    assert result.report is not None
    return result.report[NAME].num_rewrites, result.report[NAME].notes, result


def updates(step: CapturedStep) -> list[list[str]]:
    """Returns which parameters each call that writes them has, in the order of the graph."""
    names = {node: item.fqn for item, node in zip(step.inputs, step.placeholders, strict=True) if item.is_state}
    calls = step.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.List)
    return [[names[each] for each in call.args[0]] for call in calls]


def test_gradients_die_one_after_the_other() -> None:
    model = build()
    num_parts, notes, step = run(capture(model, SGD(model.parameters(), foreach=True)))
    assert (num_parts, notes) == (6, ())
    order = [[f"{layer}.{name}"] for layer in (2, 1, 0) for name in ("weight", "bias")]
    assert sorted(updates(step)) == sorted(order)
    assert [names[0][0] for names in updates(step)] == ["2", "2", "1", "1", "0", "0"]


def test_small_gradients_wait_for_others() -> None:
    model = build()
    num_parts, _, step = run(capture(model, SGD(model.parameters(), foreach=True)), num_bytes=4 * 4 * 4)
    assert num_parts == len(updates(step)) < 6
    assert sorted(fqn for each in updates(step) for fqn in each) == sorted(dict(model.named_parameters()))


def test_a_parameter_is_updated_after_its_last_reader() -> None:
    model = build()
    *_, step = run(capture(model, SGD(model.parameters(), foreach=True)))
    placeholder = dict(step.parameter_placeholders())["1.weight"]
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    (update,) = (user for user in placeholder.users if "_foreach_" in str(user.target))
    mm = torch.ops.aten.mm.default
    readers = [node for node in step.graph.nodes if node.target == mm and placeholder in ancestors(node)]
    assert readers
    assert all(order[each] < order[update] for each in readers)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Returns a node's inputs, past views."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found.add(source)
        if source.target == torch.ops.aten.t.default:
            found |= ancestors(source)
    return found


def test_parameters_of_one_memory() -> None:
    """Who ties by ``.data`` has two parameters: an update of one is seen by what still reads the other."""
    model, eager = build(), build()
    for each in (model, eager):
        each[1].weight.data = each[0].weight.data
    num_parts, notes, step = run(capture(model, SGD(model.parameters(), 0.1)))
    assert num_parts == 0
    assert notes == ("parameters are updated after the backward: '0.weight' and '1.weight' share memory",)
    step(X)
    loss_fn(eager, X).backward()
    SGD(eager.parameters(), 0.1).step()
    assert all(map(same_bits, model.parameters(), eager.parameters()))


class OneCount(Optimizer):
    """Divides by how many parameters it has updated, which one tensor in all their states counts, or two count."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, is_one: bool = True) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.is_one = is_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        counts = torch.zeros(len(parameters))
        for count, parameter in zip(counts, parameters, strict=True):
            state = self.state[parameter]
            state.setdefault("count", counts[0] if self.is_one else count).add_(1)
            parameter.sub_(parameter.grad / state["count"])


@pytest.mark.parametrize("is_one", [True, False])
def test_a_state_that_parameters_share(is_one: bool) -> None:
    """It is there after the first step alone, which is the optimizer's own."""
    model, eager = build(), build()
    optimizers = [OneCount(each.parameters(), is_one=is_one) for each in (model, eager)]
    num_parts, _, step = run(capture(model, optimizers[0]))
    assert num_parts == 6
    step(X)
    if is_one:
        with pytest.raises(CaptureError, match=r"^state 'count' of '\d.\w+' in the optimizer shares memory with "):
            step(X)
        return
    step(X)
    for _ in range(2):
        loss_fn(eager, X).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(map(same_bits, model.parameters(), eager.parameters()))


def test_a_parameter_that_is_returned() -> None:
    """Who has a view of a parameter sees its update, as in eager."""

    def with_weight(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_fn(model, x), model[0].weight[:1]

    model = build()
    step = capture_train_step(with_weight, model, X, optimizer=AdamW(model.parameters(), 0.1))
    num_parts, notes, step = run(step)
    assert num_parts == 0
    assert notes[0].endswith("after the backward: returned value 'result[1]' shares memory with a parameter")
    weight = step(X)[1]
    assert same_bits(weight, model[0].weight[:1].detach())
    assert not same_bits(weight, build()[0].weight[:1].detach())


def test_a_second_run_changes_nothing() -> None:
    model = build()
    *_, step = run(capture(model, AdamW(model.parameters())))
    num_parts, notes, again = run(step)
    assert (num_parts, notes) == (0, ())
    assert str(again.graph) == str(step.graph)


def assert_same_steps(step: CapturedStep, model: nn.Module, eager: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(3):
        step(X)
        loss_fn(eager, X).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(same_bits, model.parameters(), eager.parameters()))


def test_numbers_that_become_tensors() -> None:
    """Rprop makes tensors of its factors, in calls that read nothing else."""
    model, eager = build(), build()
    num_parts, _, step = run(capture(model, Rprop(model.parameters(), foreach=True)))
    assert num_parts
    theirs = Rprop(eager.parameters(), foreach=True)
    assert_same_steps(step, model, eager, theirs)


def test_parameters_whose_names_differ_by_a_dot_alone() -> None:
    """Their states are inputs of one name, but for what makes it unique."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.a_weight = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) @ self.a_weight

    model, eager = Named(), Named()
    num_parts, _, step = run(capture(model, AdamW(model.parameters(), 0.1)))
    assert num_parts == 2
    theirs = AdamW(eager.parameters(), 0.1)
    assert_same_steps(step, model, eager, theirs)


def test_steps_without_an_optimizer_stay() -> None:
    num_parts, notes, _ = run(capture_train_step(loss_fn, build(), X))
    assert (num_parts, notes) == (0, ())


def test_a_step_that_clips_stays() -> None:
    model = build()
    num_parts, notes, _ = run(capture(model, SGD(model.parameters()), clip_norm=1.0))
    assert num_parts == 0
    assert notes == ("parameters are updated after the backward: clipping needs all gradients at once",)


class Strided(nn.Module):
    """A parameter whose gradient has strides of zero, and perhaps one that is not contiguous itself."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.rand(4, 3)
        self.weight = nn.Parameter(weight.t() if is_transposed else weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_in_another_layout_is_copied(is_transposed: bool) -> None:
    model, eager = Strided(is_transposed), Strided(is_transposed)
    optimizers = AdamW(model.parameters(), fused=True), AdamW(eager.parameters(), fused=True)
    num_parts, notes, step = run(capture(model, optimizers[0]))
    for _ in range(3):
        loss_fn(eager, X).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        step(X)
    assert same_bits(model.weight, eager.weight)
    reason = "the gradient of 'weight' is laid out otherwise than the parameter"
    note = f"parameters are updated after the backward: {reason}"
    assert (num_parts, notes) == ((0, (note,)) if is_transposed else (1, ()))


def test_a_batch_that_is_a_parameter_is_refused() -> None:
    model = build()
    *_, step = run(capture(model, SGD(model.parameters())))
    with pytest.raises(ValueError, match=r"^the step writes 0\.weight in place, which shares memory with batch\[0\]"):
        step(model[0].weight.detach()[:3])


def test_it_is_in_the_default_pipeline_last() -> None:
    assert [each.name for each in default_pipeline().passes][-1] == NAME
    with pytest.raises(PipelineError, match=r"^pass 'update-in-backward' must run after"):
        Pipeline((UpdateInBackward(), *default_pipeline().passes[1:3]))


@dataclass(frozen=True)
class MovesUpdates(GraphPass):
    """Puts the first update before the first call: what reads the parameter then reads another value."""

    name: ClassVar[str] = "moves-updates"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP})

    def rewrite(self, graph: TrainGraph) -> int:
        call = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_mul_.Scalar)[0]
        reader = next(user for user in call.args[0][0].users if user is not call)
        sources = [each for each in call.all_input_nodes if each.op == "call_function"]
        for node in (*sources, call):
            for source in node.all_input_nodes:
                if source.op == "call_function":
                    reader.prepend(source)
            reader.prepend(node)
        return 1


def test_the_proof_sees_an_update_that_comes_too_early() -> None:
    model = build()
    step = capture(model, AdamW(model.parameters(), foreach=True))
    with pytest.raises(ProofError, match=r"^pass 'moves-updates' \(after update-in-backward\) changes "):
        Pipeline((UpdateInBackward(1), MovesUpdates())).run(step)


@dataclass(frozen=True)
class ExchangesGradients(GraphPass):
    """Updates two parameters of one shape each with the gradient of the other."""

    name: ClassVar[str] = "exchanges-gradients"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP})

    def rewrite(self, graph: TrainGraph) -> int:
        (call,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.List)
        parameters, gradients = call.args
        (one, two) = (i for i, node in enumerate(gradients) if node.meta["val"].shape == (4, 4))
        exchanged = [*gradients]
        exchanged[one], exchanged[two] = gradients[two], gradients[one]
        call.args = (parameters, exchanged)
        return 1


def test_the_proof_sees_exchanged_gradients() -> None:
    model = build()
    step = capture(model, SGD(model.parameters(), foreach=True))
    with pytest.raises(ProofError, match=r"^pass 'exchanges-gradients' .* changes parameter "):
        Pipeline((UpdateInBackward(), ExchangesGradients())).run(step)


def halves(gradient: torch.Tensor) -> None:
    torch._foreach_mul_([gradient], 0.5)  # an operator that returns none: the gradient's node stays the one before


@pytest.mark.parametrize("transposed", [False, True])
def test_what_a_hook_writes_is_applied(transposed: bool) -> None:
    def trained(*, rewritten: bool) -> nn.Module:
        model = build()
        if transposed:  # whose gradient is laid out otherwise, and copied before it is kept
            model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        for each in model.parameters():
            each.register_hook(halves)
        optimizer = SGD(model.parameters(), lr=0.1)
        if rewritten:
            num_parts, _, step = run(capture(model, optimizer))
            assert num_parts == 6
            step(X)
        else:
            loss_fn(model, X).backward()
            optimizer.step()
        return model

    models = (trained(rewritten=each).parameters() for each in (True, False))
    assert all(same_bits(*each) for each in zip(*models, strict=True))


def test_tied_parameters_are_updated_once() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    step = capture_train_step(next_token_loss, model, *token_batch(), optimizer=AdamW(model.parameters()))
    num_parts, notes, _ = run(step)
    assert num_parts == 0
    assert notes == (
        "parameters are updated after the backward: a parameter is read under several names; run deduplicate-shared",
    )
    result = Pipeline((DeduplicateShared(), UpdateInBackward(1))).run(step, prove=True)
    assert result.report is not None
    assert result.report[NAME].num_rewrites == len(list(model.parameters()))
