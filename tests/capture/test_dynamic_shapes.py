"""One capture serves batches of varying sizes, bit for bit; what decides by a size is captured again, or refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.passes import default_pipeline
from tests.helpers.models import same_bits

Loss = Callable[..., torch.Tensor]


def train(
    loss_fn: Loss, model: nn.Module, batches: list[tuple[Any, ...]], **options: Any
) -> tuple[CapturedStep, bool]:
    """Trains a captured step, captured on the first batch, and eager; returns whether all bits are the same."""
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model)]
    step = capture_train_step(loss_fn, model, *batches[0], optimizer=optimizers[1], **options)
    step = default_pipeline(BucketPlan.from_modules([])).run(step)
    same = []
    for batch in batches:
        loss = loss_fn(eager, *copy.deepcopy(batch))
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        same.append(same_bits(step(*batch), loss))
        same.extend(map(same_bits, model.parameters(), eager.parameters()))
    return step, all(same)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x / math.sqrt(x.size(-1))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.block, self.head = Block(), nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))))


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(num_rows: int, length: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 20, (num_rows, length), generator=torch.Generator().manual_seed(length)),)


ANY_LENGTH = ({0: Dim("batch"), 1: Dim("length", max=16)},)


def test_lengths_of_a_language_model() -> None:
    batches = [tokens(*sizes) for sizes in ((3, 9), (3, 12), (5, 5), (2, 16))]
    step, same = train(next_token, LanguageModel(), batches, dynamic_shapes=ANY_LENGTH)
    assert same
    assert len(step.captures) == 1


def test_without_dynamic_shapes_sizes_are_fixed() -> None:
    step = capture_train_step(next_token, LanguageModel(), *tokens(3, 9), recapture=False)
    with pytest.raises(
        BatchMismatchError, match=r"^batch\[0\] differs from the captured batch: expected shape \[3, 9\]"
    ):
        step(*tokens(3, 10))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def rows(*numbers: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(each, 4, generator=torch.Generator().manual_seed(each)),) for each in numbers]


def by_size(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum() * (2 if x.size(0) > 6 else 3)


USES: dict[str, tuple[Loss, int]] = {
    "factor": (lambda model, x: model(x).square().sum() / x.size(0), 1),
    "root": (lambda model, x: model(x).square().sum() / math.sqrt(x.size(0)), 3),
    "new_tensor": (lambda model, x: (model(x) + torch.arange(len(x))[:, None]).square().mean(), 3),
    "float": (lambda model, x: model(x).square().sum() * float(x.shape[0]), 3),
    "dropout": (lambda model, x: F.dropout(model(x), 0.5).square().sum(), 1),
    "odd": (lambda model, x: model(x[: x.size(0) // 2 * 2].view(2, -1, 4)).square().sum(), 1),
    "padded": (lambda model, x: F.pad(model(x), (0, 0, 0, 9 - x.size(0)), value=0.5).sum(), 1),
    "baddbmm": (lambda model, x: torch.baddbmm(model.layer.bias, x[None], model.layer.weight.mT[None]).sum(), 1),
    "decides": (by_size, 2),
    "in_a_loop": (lambda model, x: sum(model(x[i]).square().sum() * i for i in range(x.size(0))), 3),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_a_size(name: str) -> None:
    loss_fn, num_captures = USES[name]
    torch.manual_seed(0)
    model, batches = Net(), rows(5, 8, 4, 8, 5)
    eager = copy.deepcopy(model)
    step = capture_train_step(loss_fn, model, *batches[0], dynamic_shapes=({0: Dim.DYNAMIC},))
    for batch in batches:
        results = []
        for each, run in ((eager, lambda *x: loss_fn(eager, *x)), (model, step)):
            torch.manual_seed(1)
            each.zero_grad()
            loss = run(*batch)
            if each is eager:
                loss.backward()
            results.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
        assert all(map(same_bits, *results))
    assert len(step.captures) == num_captures


def test_another_size_taken_for_a_constant_shows() -> None:
    size = 5
    loss_fn = lambda model, x: model(x).square().sum() / size  # noqa: E731  # as a trace that keeps its example's
    _, batch = rows(5, 8)
    model = Net()
    assert not same_bits(loss_fn(model, *batch), USES["factor"][0](model, *batch))


@pytest.mark.parametrize("numbers", [(5, 1, 0, 7), (1, 5, 1), (0, 5, 0, 3)])
def test_sizes_one_and_none_are_captured_for_themselves(numbers: tuple[int, ...]) -> None:
    loss_fn = lambda model, x: model(x).square().sum()  # noqa: E731
    step, same = train(loss_fn, Net(), rows(*numbers), dynamic_shapes=({0: Dim.AUTO},))
    assert same
    assert len(step.captures) == len({min(each, 2) for each in numbers})


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_a_mean_of_no_rows(loss: Callable[..., torch.Tensor]) -> None:
    """Torch's formula for fake tensors divides by their number."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss(model(x), x[:, :3])

    model = Net()
    step = capture_train_step(loss_fn, model, *rows(5)[0], dynamic_shapes=({0: Dim.DYNAMIC},))
    for batch in rows(5, 0, 3):
        assert same_bits(step(*batch), loss_fn(model, *batch).detach())


def test_a_decision_by_a_size_that_may_not_be_captured_again() -> None:
    first, second = rows(5, 8)
    step = capture_train_step(by_size, Net(), *first, dynamic_shapes=({0: Dim.AUTO},), recapture=False)
    line = by_size.__code__.co_firstlineno + 1
    message = (
        f"loss_fn decided by sizes at {__file__}:{line} in by_size: it was 5 when the step was "
        f"captured, and is 8 for "
        "this batch. Capture it with recapture=True, or capture a step for each of these cases"
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        step(*second)


def two(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).sum() + model(y).sum()


def capture_two(spec: Any) -> CapturedStep:
    return capture_train_step(two, Net(), *rows(5)[0], *rows(5)[0], dynamic_shapes=spec)


N = Dim("n", min=2, max=8)
WRONG_SPECS: dict[str, tuple[Any, str]] = {
    "too_few": (
        ({0: N},),
        f"dynamic_shapes of batch is {({0: N},)!r}; give None, or one entry for each of [0], [1]",
    ),
    "no_such_dim": (
        ({2: N}, None),
        (
            f"dynamic_shapes of batch[0], a tensor of 2 dims, is { ({2: N})!r}; give None, or by number of the dim a "
            "torch.export.Dim"
        ),
    ),
    "derived": (
        ({0: 2 * N}, None),
        (
            f"dynamic_shapes of dim 0 of batch[0], whose size is 5, is {2 * N!r}; give a "
            f"torch.export.Dim of its own, "
            "Dim.AUTO or None"
        ),
    ),
    "another_size": (
        ((6, None), None),
        (
            "dynamic_shapes of dim 0 of batch[0], whose size is 5, is 6; give a torch.export.Dim of "
            "its own, Dim.AUTO or "
            "None"
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG_SPECS)
def test_wrong_dynamic_shapes(name: str) -> None:
    spec, message = WRONG_SPECS[name]
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture_two(spec)


def test_an_example_that_does_not_fit() -> None:
    message = "dim 0 of batch[0] has size 5, and dynamic_shapes allows 6 to any size"
    with pytest.raises(BatchMismatchError, match=f"^{re.escape(message)}$"):
        capture_two(({0: Dim("m", min=6)}, None))


WRONG_BATCHES: dict[str, tuple[tuple[torch.Tensor, torch.Tensor], str]] = {
    "too_large": (
        (torch.ones(9, 4), torch.ones(9, 4)),
        "dim 0 of batch[0] has size 9, and dynamic_shapes allows 2 to 8",
    ),
    "unequal": (
        (torch.ones(6, 4), torch.ones(7, 4)),
        "dim 0 of batch[1] has size 7, and dim 0 of batch[0] has 6: in dynamic_shapes both are 'n'",
    ),
    "other_dim": (
        (torch.ones(6, 3), torch.ones(6, 4)),
        (
            "batch[0] differs from the captured batch: expected shape [any, 4], torch.float32, on cpu, "
            "got shape [6, 3], "
            "torch.float32, on cpu. Capture a step for it, pad the batch, or name the dims that vary in "
            "capture_train_step's dynamic_shapes"
        ),
    ),
    "not_contiguous": (
        (torch.ones(4, 6).t(), torch.ones(6, 4)),
        (
            "batch[0] differs from the captured batch: expected shape [any, 4], torch.float32, on cpu, "
            "strides [4, 1], got "
            "shape [6, 4], torch.float32, on cpu, strides [1, 6]. Capture a step for it, or lay it out like "
            "that, as .contiguous() does"
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_batches_that_do_not_fit(name: str) -> None:
    step = capture_two(({0: N}, [N, None]))
    batch, message = WRONG_BATCHES[name]
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(BatchMismatchError, match=f"^{re.escape(message)}"):
        step(*batch)
    assert all(map(same_bits, step.model.state_dict().values(), before.values()))


def test_refuses_a_tensor_that_varies_and_is_not_contiguous() -> None:
    message = "batch[0] has a dim that may vary, and is not contiguous; give batch[0].contiguous() at each step"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture_train_step(by_size, Net(), torch.ones(4, 5).t(), dynamic_shapes=({0: Dim.AUTO},))
