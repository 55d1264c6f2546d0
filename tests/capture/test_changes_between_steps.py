"""What a loop changes between steps: numbers become inputs of the step, for the rest it is captured again."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpasses import BucketPlan, CapturedStep, capture_train_step, default_pipeline
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.identity import same_bits

SETTINGS: dict[str, Any] = {}
SCALE = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)
        self.temperature, self.depth, self.activation = 1.0, 1, F.relu
        self.config = SimpleNamespace(beta=0.1)
        self.scale: float | Tensor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.activation(self.first(x))) / self.temperature
        for _ in range(self.depth):
            x = torch.tanh(self.last(x))
        return x * self.config.beta * self.scale


def loss_fn(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() * SCALE
    return loss + SETTINGS["penalty"] * model.last.weight.abs().sum()


def x_of(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def temperature(model: Model, index: int) -> None:
    model.temperature = 1 / (1 + 0.1 * index)


def in_a_config(model: Model, index: int) -> None:
    model.config.beta = 0.1 * math.cos(index)


def annealed(model: Model, index: int) -> None:
    SETTINGS["penalty"] = min(1.0, index / 3)


def to_a_whole_one(model: Model, index: int) -> None:
    SETTINGS["penalty"] = min(1, index / 3)  # at last an int


def of_a_module(model: Model, index: int) -> None:
    globals()["SCALE"] = 1 + index / 7


def dropout(model: Model, index: int) -> None:
    model.dropout.p = 0.3 if index < 3 else 0.1


def both(model: Model, index: int) -> None:
    dropout(model, index)
    temperature(model, index)


def depth(model: Model, index: int) -> None:
    model.depth = 1 + index // 2 % 2


def to_a_tensor(model: Model, index: int) -> None:
    if index < 4:
        model.scale = 1.0 + index if index < 3 else torch.full((4,), 0.5)


def unfrozen(model: Model, index: int) -> None:
    model.first.requires_grad_(index > 2)


def modes(model: Model, index: int) -> None:
    model.train(index % 2 == 0)


def activation(model: Model, index: int) -> None:
    model.activation = (F.relu, F.gelu)[index // 2 % 2]


def other_config(model: Model, index: int) -> None:
    if index == 3:
        model.config = SimpleNamespace(beta=0.7)


def other_module(model: Model, index: int) -> None:
    if index == 3:
        model.last = nn.Linear(4, 4)
        nn.init.ones_(model.last.weight)


def no_change(model: Model, index: int) -> None:
    pass


def train(change: Callable[[Model, int], None], *, is_captured: bool) -> tuple[list[Tensor], int]:
    SETTINGS["penalty"] = 0.0
    globals()["SCALE"] = 1.0
    torch.manual_seed(0)
    model, step, seen = Model(), None, list[Tensor]()
    if is_captured:
        step = capture_train_step(loss_fn, model, x_of(9))
        step = default_pipeline(BucketPlan.from_modules([])).run(step, prove=False)
    torch.manual_seed(1)
    for index in range(6):
        change(model, index)
        if step is not None:
            loss = step(x_of(index))
        else:
            loss = loss_fn(model, x_of(index))
            loss.backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen, 0 if step is None else sum("captured again" in note for each in step.captures for note in each.notes)


CHANGES: dict[Callable[[Model, int], None], int] = {  # and how many are captured again, of those that are kept
    temperature: 1,
    in_a_config: 1,
    annealed: 1,
    to_a_whole_one: 2,
    of_a_module: 1,
    dropout: 1,
    both: 1,
    depth: 2,  # an input, and then each number of layers
    to_a_tensor: 1,
    unfrozen: 1,
    modes: 1,
    activation: 1,
    other_config: 1,
    other_module: 0,  # it is alike
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_equals_eager(change: Callable[[Model, int], None]) -> None:
    (eager, _), (step, num_again), (control, _) = (
        train(change, is_captured=False),
        train(change, is_captured=True),
        train(no_change, is_captured=False),
    )
    assert equal(step, eager)
    assert not equal(control, eager)
    assert num_again == CHANGES[change]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


def test_another_value_at_each_call() -> None:
    """Eight are captured, and one more for each hundred calls."""
    SETTINGS["penalty"] = 0.0
    model = Model()
    step = capture_train_step(loss_fn, model, x_of(0), check=False)
    for index in range(1, 8):
        model.dropout.p = index / 16
        step(x_of(index))
    model.dropout.p = 0.85
    with pytest.raises(CaptureError, match=r"^'dropout\.p' was 0\.4375 .* captured for 8 such cases, and no"):
        step(x_of(8))
    model.dropout.p = 0.125
    for index in range(92):
        step(x_of(index))
    model.dropout.p = 0.85
    step(x_of(9))
    assert len(step.captures) == 8


def test_numbers_that_are_built_in_cost_two_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each of the modules of which a loop sets the same."""
    parts = [nn.AlphaDropout(0.1) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 4), *parts)
    step = capture_train_step(lambda model, x: model(x).square().sum(), model, x_of(0))
    again, tries = step.recapture, list[tuple[str, ...]]()
    assert again is not None

    def counted(*args: Any, **options: Any) -> Any:
        tries.append(options["carried"].paths)
        return again(*args, **options)

    monkeypatch.setattr(step, "recapture", counted)
    for part in parts:
        part.p = 0.3
    step(x_of(1))
    assert [len(paths) for paths in tries] == [3, 0]


def test_a_traced_number_in_an_object_is_not_watched() -> None:
    """Its class would be left as what watches it, by which numbers would not be of Python's classes."""
    step = capture_train_step(lambda model, x: model(x).square().sum(), model := Model(), x_of(0))
    model.config.beta = 0.7
    step(x_of(1))
    assert len(step.captures) == 1
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
        assert "__getattribute__" not in vars(kind)


def test_a_check_after_a_change() -> None:
    SETTINGS["penalty"] = 0.0
    step = capture_train_step(loss_fn, model := Model(), x_of(0))
    model.activation = F.gelu
    step.check(x_of(1))
    assert len(step.captures) == 2


def test_what_cannot_be_captured_says_why_it_was_to_be() -> None:
    SETTINGS["penalty"] = 0.0
    step = capture_train_step(loss_fn, model := Model(), x_of(0))
    model.activation = lambda x: x.double()
    message = r"^'activation' was relu when .*<lambda> now; .*\. It could not be captured again: RuntimeError: "
    with pytest.raises(CaptureError, match=message):
        step(x_of(1))


def test_batches_of_other_shapes() -> None:
    """As the last of an epoch; and a control that no shape is taken for another."""
    SETTINGS["penalty"] = 0.0
    model, twin = Model().eval(), Model().eval()
    twin.load_state_dict(model.state_dict())
    step = capture_train_step(loss_fn, model, x_of(0))
    for x in (x_of(1), x_of(2)[:3], x_of(3), x_of(4)[:3], x_of(5)[:1]):
        loss = step(x)
        expected = loss_fn(twin, x)
        expected.backward()
        assert same_bits(loss, expected.detach())
        assert equal(*([each.grad for each in m.parameters() if each.grad is not None] for m in (model, twin)))
    assert len(step.captures) == 3
    with pytest.raises(
        BatchMismatchError, match=r"^batch\[0\] differs .* It could not be captured again: RuntimeError"
    ):
        step(torch.ones(5, 3))


def mixed(model: nn.Module, x: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    share, index = settings["share"], settings["index"]
    out = model(share * x + (1 - share) * x.roll(1, 0))
    loss = (out * torch.linspace(1.0, 2.0, 20)[index]).square().mean() * (2.0 if share > 0.5 else 1.0)
    return loss, share / 3


@pytest.mark.parametrize("wrong", [False, True])
def test_numbers_of_a_batch(wrong: bool) -> None:
    """One is captured for those by which nothing decides, and one for each decision. Control: another number."""
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    step = capture_train_step(mixed, model, x_of(0), {"share": 0.3, "index": 0})
    found = []
    for index in range(12):
        settings = {"share": (0.3 + 0.37 * index) % 1, "index": index}
        results = step(x_of(index), {**settings, "share": 0.29} if wrong else settings)
        (expected, number) = mixed(twin, x_of(index), settings)
        expected.backward()
        found.append(same_bits(results[0], expected.detach()) and results[1] == number)
        found.append(equal(*([each.grad for each in m.parameters() if each.grad is not None] for m in (model, twin))))
    assert all(found) != wrong
    assert wrong or len(step.captures) == 3


def test_a_number_of_a_batch_that_is_built_in() -> None:
    """Each is a capture of its own, and some other number stays an input."""
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor, rate: float, weight: float) -> Tensor:
        return F.alpha_dropout(model(x), rate).square().mean() * weight

    step = capture_train_step(loss_fn, model, x_of(0), 0.5, 1.0)
    for rate in (0.5, 0.25):
        for weight in (2.0, 3.0):
            step.check(x_of(0), rate, weight)
    assert [each.batch_structure.numbers for each in step.captures[1:]] == [{"batch[2]": float}] * 2


def skipped(model: nn.Module, x: Tensor, weight: float) -> Tensor:
    loss = model(x).square().mean()
    return loss if weight == 0 else loss + weight * model(-x).abs().mean()


def scaled_by_power(model: nn.Module, x: Tensor, weight: float) -> Tensor:
    return ((weight + 1.0) ** model(x)).mean()  # whose gradient torch cannot trace for a base that is an input


@pytest.mark.parametrize(("loss_fn", "num_inputs"), [(skipped, 1), (scaled_by_power, 0)])
def test_one_value_of_a_number_decides(loss_fn: Callable[..., Tensor], num_inputs: int) -> None:
    """It is built in for that value alone: others of the batch stay an input. Control: another value's loss."""
    model, weights = nn.Linear(4, 4), (0.9, 0.7, 0.0, 0.3, 0.4, 0.0)
    step = capture_train_step(loss_fn, model, x_of(0), 0.9)
    losses = [step(x_of(1), weight) for weight in weights]
    assert [each.item() for each in losses] == [loss_fn(model, x_of(1), weight).item() for weight in weights]
    assert losses[2].item() != losses[3].item()
    assert sum(bool(each.batch_structure.numbers) for each in step.captures) == num_inputs
    step.check(x_of(2), 0.0)


@pytest.mark.parametrize("is_of_batch", [False, True])
def test_schedules_that_numpy_computes(is_of_batch: bool) -> None:
    """A step computes with NumPy's numbers as NumPy does. Control: what Python rounds ``0.615`` to is another number.

    What its functions bring of them is a capture for each value, and the error says what to give.
    """
    model, shares = nn.Linear(4, 4), [np.float64(share / 200) for share in range(105, 131)]
    assert round(np.float64(0.615), 2) != round(0.615, 2)

    def run(scale: Callable[[Any], Any], kind: type) -> CapturedStep:
        def loss_fn(model: nn.Module, x: Tensor, *given: float) -> Tensor:
            return model(x).square().mean() * scale((given or (SETTINGS["share"],))[0])

        step = None
        for share in map(kind, shares):
            SETTINGS["share"], given = share, (share,) if is_of_batch else ()
            step = step or capture_train_step(loss_fn, model, x_of(0), *given)
            assert step(x_of(0), *given).item() == loss_fn(model, x_of(0), *given).item()
        assert step is not None
        return step

    for scale in (lambda share: round(share, 2), lambda share: (share - 0.6) ** 0.5 if share > 0.6 else share):
        assert len(run(scale, np.float64).captures) <= 3
        run(scale, float)
    text = r"np\.float64\(.* kept\. What NumPy's functions compute of it is built in: give the step what they bring"
    with pytest.raises(CaptureError, match=text):
        run(np.exp, np.float64)


WHY = {
    r"torch builds it in at \S+ in <lambda>, as": lambda x, share: F.alpha_dropout(x, share),
    r"It cannot be an input of the step: eager and": lambda x, share: share if type(share) is float else 1.0,
}


@pytest.mark.parametrize("why", WHY)
def test_why_a_number_is_no_input(why: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * WHY[why](x, SETTINGS["share"])).mean()

    def run() -> None:
        SETTINGS["share"] = 0.1
        step = capture_train_step(loss_fn, nn.Linear(4, 4), x_of(0))
        for index in range(12):
            SETTINGS["share"] = 0.1 + index / 20
            step(x_of(0))

    with pytest.raises(CaptureError, match=rf"captured for 8 such cases, and no more are kept\. {why}"):
        run()


def optional(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """A mask, or a weight, that some batches have, and any number of samples."""
    loss = torch.stack([model(x).square().mean() for x in batch["xs"]]).mean() * batch.get("weight", 1.0)
    return loss if "mask" not in batch else loss + (model(batch["xs"][0]) * batch["mask"]).mean()


def test_batches_that_are_built_otherwise() -> None:
    """Each structure is captured, and again where its number is another one. Control: another mask."""
    model, masks = nn.Linear(4, 4), (torch.ones(5, 1), torch.zeros(5, 1))
    step = capture_train_step(optional, model, {"xs": [x_of(0)]})
    for index in range(4):
        for batch in (
            {"mask": masks[index % 2], "xs": [x_of(1), x_of(index)]},
            {"xs": [x_of(index)]},
            {"xs": [x_of(index)], "weight": 0.3 * index},
        ):
            step.check(batch)
            assert same_bits(step(batch), optional(model, batch).detach())
    assert not same_bits(*(step({"mask": mask, "xs": [x_of(0), x_of(1)]}) for mask in masks))
    assert len(step.captures) == 4
    with pytest.raises(BatchMismatchError, match=r"^batch\[0\] lacks \['mask'\]; .* again: TypeError: 'int' object"):
        step({"xs": 1})


def test_code_that_goes_through_a_mapping() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        first, second = (model(each).square().mean() for each in batch.values())
        return first + 0.3 * second

    model, batch = nn.Linear(4, 4), {"x": x_of(0), "y": x_of(1)}
    turned = dict(reversed(batch.items()))
    step = capture_train_step(loss_fn, model, batch)
    for each in (turned, batch, turned):
        assert same_bits(step(each), loss_fn(model, each).detach())
    assert len(step.captures) == 2
    assert not same_bits(step(batch), step(turned))
