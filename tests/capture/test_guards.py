"""Values that ``loss_fn`` decides by are guards: a batch that decides otherwise is captured again, or refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.guards import NO_DECISION
from graphpasses.passes import CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import same_bits

Loss = Callable[..., torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("limit", torch.tensor(2.0))
        self.register_buffer("num_calls", torch.tensor(0))
        self.unregistered = torch.tensor(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def batch(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows, and a mask of the first of them."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(num_rows))
    return x, (torch.arange(8) < num_rows).long()


def bits(step: Callable[..., torch.Tensor], model: nn.Module, *args: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = step(*args)
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_as_eager(loss_fn: Loss, numbers: list[int], num_captures: int, **options: Any) -> CapturedStep:
    """Trains captured and eagerly, with as many rows in the mask as ``numbers`` say; both have the same bits."""
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    step = capture_train_step(loss_fn, model, *batch(numbers[0]), **options)
    for number in numbers:
        expected = bits(lambda *args: loss_fn(eager, *args), eager, *batch(number))
        assert all(map(same_bits, bits(step, model, *batch(number)), expected))
    assert len(step.captures) == num_captures
    return step


def refusal(loss_fn: Loss, *args: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, model or Net(), *(args or batch(8)))
    return str(caught.value)


def line_of(function: Callable[..., Any], offset: int) -> str:
    lines = inspect.getsourcelines(function)[1]
    return f"{__file__}:{lines + offset} in {function.__name__}"


# ---- what decides --------------------------------------------------------------------------------------------


def by_bool(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if torch.all(mask == 1):
        return model(x).square().mean()
    return (model(x).square() * mask[:, None]).sum()


def by_item(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    num_rows = mask.sum().item()
    return model(x).square().sum() / (num_rows if num_rows > 3 else 3)


def by_equal(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(x).sum() * (2 if torch.equal(mask, torch.ones_like(mask)) else 3)


def by_float(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(x).sum() * (0.1 if mask.float().mean().item() > 0.3 else 0.7)


def by_int(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = model(x)
    for _ in range(int(mask.sum())):
        y = y.tanh()
    return y.sum()


def by_list(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(x[i : i + 1]) for i in range(8) if mask.tolist()[i]]).square().sum()


def by_size(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = x[mask.bool()]
    return model(rows).sum() if rows.shape[0] > 3 else model(x).mean()


def by_squeeze(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(x)[mask.nonzero().squeeze()].mean(0).square().sum()


def by_write(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What decides was written in place, through a view, and so was the batch."""
    counts = torch.zeros(2, dtype=torch.long)
    counts[0].add_(mask.sum())
    mask.mul_(2)
    return model(x).sum() * (2 if counts[0] * 2 == mask.sum() and counts[0] > 3 else 3)


def in_backward(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        return model(x).tanh() if mask.sum() > 3 else model(x).relu()

    return checkpoint(block, x, use_reentrant=False).square().sum()


@pytest.mark.parametrize(
    ("loss_fn", "num_captures"),
    [
        (by_bool, 2),
        (by_item, 2),
        (by_equal, 2),
        (by_float, 2),
        (by_int, 4),
        (by_list, 4),
        (by_size, 2),
        (by_squeeze, 2),
        (by_write, 2),
        (in_backward, 2),
    ],
)
def test_decisions_fall_as_in_eager(loss_fn: Loss, num_captures: int) -> None:
    step = assert_as_eager(loss_fn, [8, 8, 2, 8, 5, 2, 1], num_captures)
    first, other = (bits(lambda *args: loss_fn(step.model, *args), step.model, *batch(n)) for n in (8, 2))
    assert not same_bits(first[0], other[0])


def test_what_decides_by_a_buffer() -> None:
    def loss_fn(model: Net, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        model.num_calls += 1
        return model(x).sum() * (3 if model.num_calls > model.limit else 2)

    assert_as_eager(loss_fn, [8] * 4, num_captures=2)


def test_what_decides_by_a_tensor_that_is_no_buffer() -> None:
    def loss_fn(model: Net, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * (3 if model.unregistered.item() > 2 else 2) / model.unregistered.item()

    model = Net()
    step = capture_train_step(loss_fn, model, *batch(8))
    for value in (2, 5, 7, 1):
        model.unregistered.fill_(value)
        assert same_bits(step(*batch(8)), loss_fn(model, *batch(8)).detach())
    assert len(step.captures) == 2


def test_what_decides_by_a_tensor_that_the_step_writes() -> None:
    """As a moving average does that begins with a copy; that of a buffer is followed."""

    def average(module: Any, args: Any, out: torch.Tensor) -> None:
        if module.num_calls == 0:
            module.ema.copy_(out.detach())
        else:
            module.ema.lerp_(out.detach(), 0.1)
        module.num_calls.add_(1)

    def build(is_buffer: bool) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 2)
        model.register_buffer("ema", torch.zeros(3, 2))
        num_calls = torch.tensor(0)
        if is_buffer:
            model.register_buffer("num_calls", num_calls)
        else:
            model.num_calls = num_calls
        model.register_forward_hook(average)
        return model

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.arange(6.0).view(3, 2)
    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, build(False), x)
    line = average.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"loss_fn decides by a tensor's value at {__file__}:{line} in average, and changes that value itself: it was "
        "True, and is False after it ran. A captured step reads and writes such a tensor as eager does only where it "
        "is a buffer of the model: make it one (register_buffer), or update it after the step"
    )
    model, eager = build(True), build(True)
    step = capture_train_step(loss_fn, model, x)
    for number in range(3):
        step(x * number)
        loss_fn(eager, x * number)
    assert same_bits(model.ema, eager.ema)
    assert model.num_calls == eager.num_calls == 3


# ---- what decides nothing ------------------------------------------------------------------------------------


def test_a_value_that_is_only_used_is_no_guard() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x[mask.bool()]).square().sum() / mask.sum().item() * model.limit.item()

    step = assert_as_eager(loss_fn, [8, 3, 1, 5], num_captures=1)
    assert step.guards is None


def test_constants_decide_for_ever() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0])
        return model(x).sum() * (2 if rows.sum() > torch.tensor(3) else 3)

    assert assert_as_eager(loss_fn, [8, 3], num_captures=1).guards is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert capture_train_step(loss_fn, Net(), *batch(8)).guards is None


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_are_never_dropped(training: bool) -> None:
    """As transformers' models drop layers; the random number is drawn nonetheless."""

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() if torch.rand([]) < 0.0 else y.mean()

    model = Net().train(training)
    step = capture_train_step(loss_fn, model, *batch(8))
    torch.manual_seed(1)
    expected, after = loss_fn(model, *batch(8)).detach(), torch.rand(())
    torch.manual_seed(1)
    assert same_bits(step(*batch(8)), expected)
    assert same_bits(torch.rand(()), after)


# ---- captured again ------------------------------------------------------------------------------------------


def test_a_step_that_is_captured_again_goes_through_the_same_pipelines() -> None:
    step = capture_train_step(by_bool, Net(), *batch(8))
    first = Pipeline((DeduplicateShared(),)).run(step)
    second = Pipeline((CoalesceGradReductions(),)).run(first)
    for each, names in ((step, None), (first, "deduplicate-shared"), (second, "coalesce-grad-reductions")):
        each(*batch(2))
        reports = [captured.report for captured in each.captures]
        assert [report and report.passes[0].name for report in reports] == [names, names]
    assert [len(each.captures) for each in (step.copy(), first.copy())] == [1, 1]


def test_a_step_for_another_model_is_captured_again_for_that_model() -> None:
    step = capture_train_step(by_bool, Net(), *batch(8))
    step(*batch(2))
    other = Net()
    moved = step.for_model(other)
    assert same_bits(moved(*batch(2)), by_bool(other, *batch(2)).detach())
    assert [captured.model for captured in moved.captures] == [other, other]


def test_what_only_cuts_is_captured_once() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x[: mask.sum().item()]).sum()

    assert_as_eager(loss_fn, list(range(1, 9)), num_captures=1)


def test_a_step_is_captured_eight_times_at_most() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * int(mask.sum())

    step = assert_as_eager(loss_fn, list(range(8)), num_captures=8)
    with pytest.raises(CaptureError) as caught:
        step(*batch(8))
    assert str(caught.value) == (
        f"loss_fn decided by a tensor's value at {line_of(loss_fn, 1)}: it was 0 when the step was captured, and is "
        f"8 for this batch. The step was captured for 8 such cases, and no more are kept. {NO_DECISION}"
    )
    step(*batch(7))


def test_a_step_is_captured_again_under_no_grad() -> None:
    step = capture_train_step(by_bool, Net(), *batch(8))
    with torch.no_grad():
        step(*batch(2))
    assert step.model.layer.weight.grad is not None


def test_without_recapture() -> None:
    step = assert_as_eager(by_bool, [8, 8], num_captures=1, recapture=False)
    with pytest.raises(CaptureError) as caught:
        step(*batch(2))
    assert str(caught.value) == (
        f"loss_fn decided by a tensor's value at {line_of(by_bool, 1)}: it was True when the step was captured, and "
        "is False for this batch. Capture it with recapture=True, or capture a step for each of these cases"
    )


# ---- what is refused -----------------------------------------------------------------------------------------

RULE = (
    ". A captured step decides by values of the batch, of buffers and of constants, and thrice by whether what "
    f"parameters compute is above or below something. {NO_DECISION}"
)


def assert_refused(loss_fn: Loss, offset: int, reason: str, *args: Any) -> None:
    assert refusal(loss_fn, *args) == (
        "loss_fn decides by a tensor's value (int(tensor), bool(tensor), a comparison) at "
        f"{line_of(loss_fn, offset)}, and that value {reason}{RULE}"
    )


def test_decided_by_a_value_of_a_parameter() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = model(x).sum()
        return y * int(y)

    assert_refused(loss_fn, 2, "depends on parameter 'layer.bias'")


def test_decided_by_what_a_parameter_was_written_to() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(3)
        counts[:2].copy_(model.layer.bias.detach())
        return model(x).sum() * (2 if counts[2].item() == 0 else 3)

    assert_refused(loss_fn, 3, "depends on parameter 'layer.bias'")


def test_decided_by_a_fake_batch() -> None:
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(tensor) for tensor in batch(8)]
    assert_refused(by_bool, 1, "depends on batch[1], a fake tensor", *args)


def test_decided_by_what_is_no_number() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * (2 if (mask.sum() / 0.0).item() > 3 else 3)

    assert_refused(loss_fn, 1, "is inf")


def test_an_operator_without_a_fake_result() -> None:
    def solved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(model(x), x).solution.sum()

    with pytest.raises(CaptureError) as caught:
        capture_train_step(solved, nn.Linear(3, 4), torch.randn(8, 3))
    assert str(caught.value) == (
        f"loss_fn calls aten.linalg_lstsq.default at {line_of(solved, 1)}, which cannot be traced: the shape of its "
        "result depends on values, or it has no fake kernel. Use another operator, or compute it outside"
    )


def test_sizes_that_follow_from_a_mask() -> None:
    """As DLRM selects pairs of embeddings: parameters decide what is selected there, and not how much."""

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = model(x).masked_select(mask).view(-1, 2)
        if len(chosen) == len(x):
            return chosen.sum()
        return chosen.square().sum()

    model, x = nn.Linear(4, 3), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    two, four = (torch.arange(15).view(5, 3) % 3 < 2), torch.arange(15).view(5, 3) < 12
    step = capture_train_step(loss_fn, model, x, two)
    for mask, num_captures in ((two, 1), (four, 2), (two.flip(1), 2)):
        assert torch.equal(step(x, mask), loss_fn(model, x, mask))
        assert len(step.captures) == num_captures
    assert not torch.equal(step(x, two), loss_fn(model, x, four))
    with pytest.raises(CaptureError, match="depends on parameter"):
        capture_train_step(lambda model, x: loss_fn(model, x, model(x) > 0), model, x)
