"""What no list of watched values holds is found by comparing the step with eager, at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.identity import same_bits
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import LanguageModel, make_mesh, next_token_loss, token_batch

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Unseen:
    """A number that neither names nor attributes show: a generator's frame has it."""

    def __init__(self) -> None:
        def values(scale: float) -> Any:
            while True:
                scale = (yield scale) or scale

        frame = values(1.0)
        next(frame)
        self.read: Callable[..., float] = frame.send


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


@pytest.mark.parametrize("rewrite", [lambda step: step, Pipeline(()).run])
def test_a_change_that_nothing_sees(rewrite: Callable[[Any], Any]) -> None:
    unseen, model = Unseen(), build()
    step = rewrite(capture_train_step(lambda model, x: model(x).mean() * unseen.read(None), model, X))
    step.check(X)
    step.check(2 * X)
    unseen.read(2.0)
    step(X)
    with pytest.raises(FidelityError) as caught:
        step.check(X)
    assert str(caught.value).startswith("the captured step computes another loss than eager on this batch: ")
    assert str(caught.value).endswith("capture the step again")


def test_a_returned_value_that_is_another() -> None:
    unseen = Unseen()
    step = capture_train_step(lambda model, x: (model(x).mean(), x * unseen.read(None)), nn.Linear(4, 4), X)
    step.check(X)
    unseen.read(2.0)
    with pytest.raises(
        FidelityError, match=r"the captured step computes another result\[1\] than eager on this batch: "
    ):
        step.check(X)


def double_in_its_node(model: nn.Module) -> Any:
    """Doubles the gradient of a weight in the node that accumulates it, which has no list of its hooks."""
    view = model[0].weight.view_as(model[0].weight)
    node = view.grad_fn.next_functions[0][0]
    return node, node.register_prehook(lambda gradients: (2 * gradients[0],))


@torch.library.custom_op("graphpasses_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def give_formula(factor: float) -> None:
    square.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0] * factor,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )


square.register_fake(torch.empty_like)
give_formula(2.0)


@pytest.mark.parametrize("change", [double_in_its_node, lambda _: give_formula(3.0)])
def test_hooks_and_formulas_that_only_autograd_knows(change: Callable[[nn.Module], Any]) -> None:
    give_formula(2.0)
    model = build()
    step = capture_train_step(lambda model, x: square(model[0](x)).mean(), model, X)
    step.check(X)
    kept = change(model)
    with pytest.raises(FidelityError, match=r"another gradient of '0\.weight' than eager"):
        step.check(X)
    del kept


def test_everything_is_put_back() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = capture_train_step(lambda model, x: model(x.add_(1)).mean(), model, X, optimizer=optimizer, clip_norm=1.0)

    def state() -> dict[str, torch.Tensor]:
        moments = [value for each in optimizer.state.values() for value in each.values()]
        named = {f"moment {index}": value for index, value in enumerate(moments)}
        return {"x": x, "random": torch.get_rng_state(), **model.state_dict(), **named}

    for _ in range(2):  # without and with the optimizer's state
        x = X.clone()
        before = {name: value.clone() for name, value in state().items()}
        step.check(x)
        after = state()
        assert before.keys() == after.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
        step(x)
        assert not all(same_bits(value, before[name]) for name, value in state().items() if name in before)


def test_another_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = capture_train_step(lambda model, x: model(x).mean(), model, X, optimizer=optimizer)
    step(X)
    step.check(X)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: model[0].weight.data.add_(1.0))
    with pytest.raises(FidelityError, match=r"another parameter '0\.weight'"):
        step.check(X)


@pytest.mark.parametrize(("every", "checked"), [(None, []), (4, [4, 8, 12]), ("sparse", [10, 100])])
def test_which_calls_are_checked(every: Any, checked: list[int]) -> None:
    step = capture_train_step(lambda model, x: model(x).mean(), nn.Linear(4, 4), X, check_every=every)
    calls: list[int] = []
    checker = step.checker
    assert checker is not None
    step.checker = lambda step, batch: calls.append(step._num_calls)
    for _ in range(110 if every == "sparse" else 12):
        step(X)
    assert calls == checked


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "often"])
def test_a_number_of_calls_that_is_none(every: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: model(x).mean(), nn.Linear(4, 4), X, check_every=every)
    assert str(caught.value) == f'check_every is {every!r}; give a number of calls, "sparse", or None'


def test_where_there_is_nothing_to_compare_with() -> None:
    with fake_process_group(2):
        model = fully_shard(LanguageModel(), mesh=make_mesh(2))
        step = capture_train_step(next_token_loss, model, *token_batch())
        with pytest.raises(CaptureError, match=r"^step\.check compares bits, and eager's may differ"):
            step.check(*token_batch())
    step.checker = None
    with pytest.raises(CaptureError, match="knows no loss_fn"):
        step.check(*token_batch())


def test_a_default_device_that_is_another() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with torch.device("meta"):  # what graphpasses made there would hold no numbers
        step = capture_train_step(lambda model, x: model(x).mean(), model, X, optimizer=optimizer)
        step(X)
        step.check(X)
        assert Pipeline(()).run(step)(X).device == X.device


def test_a_refused_step_runs_no_hook_that_came_since() -> None:
    model, held = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters())
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4), optimizer=optimizer)
    for register in (optimizer.register_step_post_hook, model.register_forward_hook):
        hook = register(lambda *args: held.append(args))
        with pytest.raises(CaptureError, match="hook"):
            step.check(torch.ones(2, 4))
        hook.remove()
    step.check(torch.ones(2, 4))
    assert not held


@pytest.mark.parametrize("every", [1, None])
def test_a_checked_call_that_raises_has_drawn_before(every: int | None) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    model, labels = build(), torch.tensor([0, 1, 2])
    step = capture_train_step(loss_fn, model, X, labels, check_every=every)
    torch.manual_seed(0)
    with pytest.raises(IndexError):
        step(X, labels + 9)
    found = torch.get_rng_state()
    torch.manual_seed(0)
    assert not torch.equal(found, torch.get_rng_state())
    with pytest.raises(IndexError):
        loss_fn(model, X, labels + 9)
    assert torch.equal(found, torch.get_rng_state())
