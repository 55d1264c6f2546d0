"""Tensors that a step leaves and the next one reads: hidden states, memories, averages, queues, metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.identity import same_bits
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.stateful import linear, mean


def batches(num: int = 5) -> list[Tensor]:
    return [*torch.randn(num, 3, 4, generator=torch.Generator().manual_seed(1))]


class Program(NamedTuple):
    model: Any
    loss_fn: Callable[[Any, Tensor], Tensor]
    read: Callable[[], Any]  # what it keeps
    change: Callable[[], Any]  # what a loop does that begins a new sequence


class Recurrent(nn.Module):
    """Goes on from step to step, as truncated backpropagation through time does."""

    def __init__(self, hidden: Any = None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.cell, self.hidden = nn.LSTMCell(4, 4), hidden

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, self.hidden)
        self.hidden = h.detach(), c.detach()
        return h


def from_none() -> Program:
    model = Recurrent()
    return Program(model, mean, lambda: model.hidden, lambda: setattr(model, "hidden", None))


def in_an_attribute() -> Program:
    model = Recurrent((torch.zeros(3, 4), torch.zeros(3, 4)))
    return Program(model, mean, lambda: model.hidden, lambda: setattr(model, "hidden", (model.hidden[1],) * 2))


def in_a_variable() -> Program:
    state: Tensor | None = None

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        nonlocal state
        out = model(x if state is None else x + state)
        state = out.detach()
        return out.square().mean()

    def reset() -> None:
        nonlocal state
        state = None

    return Program(linear(), loss_fn, lambda: state, reset)


def in_a_dict() -> Program:
    cache: dict[Any, Tensor] = {}

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        before = cache.get(x.shape)
        out = model(x if before is None else x - before)
        cache[x.shape] = x
        return out.square().mean()

    return Program(linear(), loss_fn, lambda: dict(cache), cache.clear)


def in_a_queue() -> Program:
    queue = deque([torch.full((3, 4), float(i)) for i in range(3)], maxlen=3)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        queue.append(out.detach())
        return sum(((index + 1) * out * each).mean() for index, each in enumerate(queue))  # type: ignore[return-value]

    return Program(linear(), loss_fn, lambda: [*queue], queue.reverse)


def in_a_new_list() -> Program:
    model = linear()
    model.memory = [torch.zeros(3, 4), torch.ones(3, 4)]

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        first, second = model.memory
        out = model(x + first) * second
        model.memory = [second, out.detach()]
        return out.square().mean()

    return Program(model, loss_fn, lambda: model.memory, lambda: model.memory.reverse())


def averages() -> Program:
    """A number that becomes a tensor, what is there from the second call on, counts, and what nothing reads."""
    kept = SimpleNamespace(average=0.0, best=None, n=0, last=None, calls=None)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss = mean(model, x)
        with torch.no_grad():
            kept.average = 0.9 * kept.average + 0.1 * loss
            kept.best = loss if kept.best is None else torch.minimum(loss, kept.best)
        kept.n, kept.last, kept.calls = kept.n + 1, x * 2, (kept.calls or 0) + 1
        return loss * kept.average + loss * kept.best * kept.n

    return Program(linear(), loss_fn, lambda: vars(kept).copy(), lambda: vars(kept).update(best=torch.zeros(())))


def metrics() -> Program:
    """As torchmetrics has them: an object's sums, replaced at each update."""
    model = linear()
    model.metric = nn.Module()
    model.metric.sum, model.metric.count = torch.zeros(()), torch.tensor(0)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        model.metric.sum = model.metric.sum + out.detach().sum()
        model.metric.count = model.metric.count + out.numel()
        return out.square().mean()

    def reset() -> None:
        model.metric.sum, model.metric.count = torch.zeros(()), torch.tensor(0)

    return Program(model, loss_fn, lambda: [model.metric.sum, model.metric.count], reset)


class OfItsClass(nn.Linear):
    state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x + self.state)
        type(self).state = out.detach()
        return out


def counts() -> Program:
    """A number of a module that is not there at the first call."""
    model = linear()
    model.calls = None

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        model.calls = (model.calls or 0) + 1
        model.level = getattr(model, "level", 0.5) * 0.75
        return mean(model, x) * model.calls * model.level

    return Program(
        model, loss_fn, lambda: [model.calls, getattr(model, "level", None)], lambda: setattr(model, "calls", 7)
    )


def of_a_class() -> Program:
    torch.manual_seed(0)
    OfItsClass.state = torch.zeros(3, 4)
    model = OfItsClass(4, 4)
    return Program(
        model, mean, lambda: [OfItsClass.state, *vars(model)], lambda: setattr(OfItsClass, "state", torch.ones(3, 4))
    )


def decides() -> Program:
    model = linear()
    model.level = torch.zeros(())

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss = mean(model, x)
        loss = loss * 2 if model.level > 0.2 else loss
        model.level = (model.level + 0.15) % 0.4
        return loss

    return Program(model, loss_fn, lambda: model.level, lambda: setattr(model, "level", torch.tensor(0.3)))


PROGRAMS: tuple[Callable[[], Program], ...] = (
    from_none,
    in_an_attribute,
    in_a_variable,
    in_a_dict,
    in_a_queue,
    in_a_new_list,
    averages,
    metrics,
    counts,
    of_a_class,
    decides,
)


def tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return tensors([*value.items()])
    return [each for item in value for each in tensors(item)] if isinstance(value, (list, tuple)) else [value]


def train(
    make: Callable[[], Program],
    *,
    is_captured: bool,
    changes: bool = True,
    updates: bool = False,
    rewrites: bool = False,
    **options: Any,
) -> list[Any]:
    """Trains five steps; before the fourth the loop begins anew, if it ``changes`` what is kept."""
    program, found = make(), list[Any]()
    optimizer = torch.optim.SGD(program.model.parameters(), 0.1)
    step: Any = None
    if is_captured:
        options |= {"optimizer": optimizer} if updates else {}
        before = [*map(str, tensors(program.read()))]
        step = capture_train_step(program.loss_fn, program.model, batches()[0], **options)
        assert [*map(str, tensors(program.read()))] == before
        if rewrites:
            step = default_pipeline(BucketPlan.from_modules([])).run(step)
    for index, x in enumerate(batches()):
        if changes and index == 3:
            program.change()
        if step is not None:
            found.append(step(x))
        else:
            found.append(loss := program.loss_fn(program.model, x))
            loss.backward()
        if not (step is not None and updates):
            optimizer.step()
            optimizer.zero_grad()
        found += [*tensors(program.read()), *(each.detach().clone() for each in program.model.parameters())]
    if step is not None:
        step.check(batches()[0])
    return found


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_equal, one, other))


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_equals_eager(make: Callable[[], Program]) -> None:
    eager = train(make, is_captured=False)
    assert equal(train(make, is_captured=True), eager)
    assert equal(train(make, is_captured=True, check=False, updates=True, rewrites=True), eager)
    assert not equal(train(make, is_captured=False, changes=False), eager)


def test_begun_again() -> None:
    """Two captures serve all sequences: of their first step, and of the others."""
    program = from_none()
    step = capture_train_step(program.loss_fn, program.model, batches()[0])
    for _ in range(12):
        program.model.hidden = None
        for x in batches(3):
            step(x)
    assert len(step.captures) == 2


def of_sizes(step: Any, model: Any) -> list[Tensor]:
    found = []
    for size in (3, 3, 5, 5, 2, 2, 7, 7, 4, 4):
        x = torch.linspace(-1, 1, 4 * size).view(size, 4)
        model.state = model.state if model.state is not None and len(model.state) == size else None
        found.append(step(model, x))
    return found


def test_sizes_follow_those_of_the_batch() -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x if model.state is None else x + model.state)
        model.state = out.detach()
        return out.square().mean()

    eager, model = linear(), linear()
    eager.state = model.state = None
    shapes = ({0: torch.export.Dim("size", min=2, max=64)},)
    step = capture_train_step(loss_fn, model, batches()[0], dynamic_shapes=shapes)
    assert equal(of_sizes(lambda _, x: step(x), model), [each.detach() for each in of_sizes(loss_fn, eager)])
    assert len(step.captures) == 2


def test_a_tensor_that_a_loop_replaces() -> None:
    """It becomes an input, as a number does, and stays the loop's own."""
    model, eager = linear(), linear()
    step = capture_train_step(lambda model, x: (model(x) * model.mask).mean(), give(model, 0), batches()[0])
    for index in range(12):
        (loss := (give(eager, index)(batches()[0]) * eager.mask).mean()).backward()
        mask = give(model, index).mask
        assert same_bits(step(batches()[0]), loss.detach())
        assert model.mask is mask
    assert same_bits(model.weight.grad, eager.weight.grad)
    assert len(step.captures) == 2


def give(model: Any, index: int) -> Any:
    model.mask = torch.full((3, 4), float(index)).cos()
    return model


def test_another_kind_is_captured_again() -> None:
    """A sequence of another batch size, strides that eager's state has from the second call on, one tensor twice."""
    program, eager = in_an_attribute(), in_an_attribute()
    step = capture_train_step(program.loss_fn, program.model, batches()[0])
    for model in (program.model, eager.model):
        model.hidden = torch.zeros(4, 3).t(), torch.zeros(4, 3).t()
    for size in (3, 3, 2, 2):
        x = batches()[0][:size]
        for model in (program.model, eager.model):
            model.hidden = tuple(each[:size] for each in model.hidden)
        assert same_bits(step(x), mean(eager.model, x).detach())


def sharded() -> list[Any]:
    found = list[Any]()
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Recurrent(), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        step: Any = capture_train_step(mean, model, batches()[0]) if is_captured else None
        step = step and default_pipeline().run(step)
        for index, x in enumerate(batches()):
            if index == 3:
                model[0].hidden = None
            if step is None:
                (loss := mean(model, x)).backward()
            else:
                loss = step(x)
            found += [loss.detach(), *model[0].hidden]
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    half = len(found) // 2
    return [equal(found[:half], found[half:]), len(step.captures)]


def test_on_two_ranks() -> None:
    assert run_cluster(sharded, Topology(2, gpus_per_node=2)) == [[True, 2]] * 2
