"""What a step leaves in modules, as eager does: buffers that forward replaces, attributes that it sets."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from graphpasses import capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.parity.hashing import weight_hash
from graphpasses.simulate import Topology, run_cluster
from graphpasses.state.keys import are_alike
from graphpasses.state.left_tensors import values_of
from graphpasses.state.patterns import walk


class Centred(nn.Module):
    """A loss's running center, an auxiliary loss, and the weights that torch's old reparametrizations compute."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(4))
        self.linear = nn.utils.weight_norm(nn.Linear(4, 4))
        self.other = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.linear(x))
        self.auxiliary = x.square().mean()
        loss = (x - self.center).square().mean()
        with torch.no_grad():
            self.center = self.center * self.momentum + x.mean(0) * (1 - self.momentum)
        return loss + 0.1 * self.auxiliary


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def batches() -> list[torch.Tensor]:
    return [*torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))]


def built(momentum: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    return Centred(momentum)


def train(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, optimizer: Any = None) -> list[Any]:
    found: list[Any] = []
    for x in batches():
        found.append(run(x))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        values = walk([*values_of(model).values()]).values()
        found += [each.detach() for each in values if isinstance(each, torch.Tensor)]
    return [*found, *(each.detach() for each in model.parameters())]


def eagerly(model: nn.Module) -> list[Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, x)
        loss.backward()
        return loss.detach()

    return train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_step_leaves_what_eager_leaves() -> None:
    x = batches()[0]
    expected = eagerly(built())
    for is_in_step in (False, True):
        model = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = capture_train_step(loss_fn, model, x, optimizer=optimizer if is_in_step else None)
        before = model.center
        assert same(train(step, model, None if is_in_step else optimizer), expected)
        step.check(x)
        assert before.eq(0).all()  # whoever holds the buffer that was has it
    assert not same(eagerly(built(0.8)), expected)
    assert [item.fqn for item in step.outputs if item.kind.name == "LEFT"] == [
        "center",
        "auxiliary",
        "linear.weight",
        "other.weight",
    ]


class Recomputed(nn.Module):
    """Backward sets the buffer again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).relu()
        self.mean = self.mean / 2 + x.detach().mean(0)
        return x * self.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


def test_what_backward_sets_again() -> None:
    eager, model = Recomputed(), Recomputed()
    step = capture_train_step(loss_fn, model, batches()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert same(train(step, model, optimizer), eagerly(eager))


def sharded_and_trained(is_captured: bool) -> tuple[str, list[float]]:
    model = Recomputed()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found, step = [], None
    for _ in range(2):
        for micro, x in enumerate(batches()):
            model.set_requires_gradient_sync(micro == 3)
            if is_captured:
                step = step or default_pipeline().run(capture_train_step(loss_fn, model, x))
                found.append(step(x).item())
            else:
                loss = loss_fn(model, x)
                loss.backward()
                found.append(loss.item())
            found += model.mean.tolist()
        optimizer.step()
        optimizer.zero_grad()
    return weight_hash(model), found


def both() -> Any:
    return sharded_and_trained(False), sharded_and_trained(True)


def test_microbatches_of_a_sharded_model_leave_it() -> None:
    for eager, captured in run_cluster(both, Topology(2, gpus_per_node=2)):
        assert captured == eager


class Scaled(nn.Linear):
    scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_rows, self.auxiliary = x.shape[0], x.square().mean()
        return super().forward(x)


def test_what_a_wrapper_answers_for_its_module() -> None:
    def of_wrapped(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(x).mean() * model[0].scale
        return loss + model[0].auxiliary, model[0].auxiliary * model[0].num_rows

    wrapped = Scaled(4, 4)
    wrapped.scale = 0.25
    with pytest.raises(CaptureError, match="is what checkpoint_wrapper wraps as a whole"):
        capture_train_step(of_wrapped, checkpoint_wrapper(wrapped), batches()[0])
    model = nn.Sequential(checkpoint_wrapper(wrapped))
    step = capture_train_step(of_wrapped, model, batches()[0], recapture=False)
    for x in batches():
        step.check(x)
        assert torch.equal(step(x)[1], x.square().mean() * 3)
    wrapped.scale = 2.0
    with pytest.raises(
        CaptureError, match=r"_checkpoint_wrapped_module\.scale' was 0\.25 when the step was captured"
    ):
        step(x)


class Remembering(nn.Linear):
    """Reads what it has kept past its attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.last = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) + self.__dict__["last"]
        self.last = out.detach()
        return out.square().mean()


def test_what_forward_reads_past_an_attribute_and_then_keeps() -> None:
    model = Remembering()
    message = (
        r"forward reads the attribute 'last' and keeps a tensor, or its \.item\(\), in it.*register_buffer\('last'"
    )
    with pytest.raises(CaptureError, match=message):
        capture_train_step(loss_fn, model, batches()[0])
    assert not model.last.any()


class Numbered(nn.Linear):
    def __init__(self, reads: Callable[[Any], float] = lambda module: 0.0) -> None:
        super().__init__(4, 4)
        self.reads, self.last, self.count = reads, 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) + self.reads(self)
        self.last, self.count = 2 * out.mean().item(), (out > 0).sum().item()
        return out.square().mean()


def test_numbers_that_follow_from_tensors() -> None:
    model, (first, second) = Numbered(), batches()[:2]
    step = capture_train_step(loss_fn, model, first)
    assert (model.last, model.count) == (0.0, 0)
    step(second)
    found = model.last, model.count
    model(second)
    assert found == (model.last, model.count)
    model(first)
    assert found[0] != model.last


def test_a_number_that_is_read_before_it_is_set() -> None:
    model, first = Numbered(lambda module: module.last), batches()[0]
    eager = copy.deepcopy(model)
    step = capture_train_step(loss_fn, model, first)
    for x in batches():
        assert torch.equal(step(x), loss_fn(eager, x))
        assert (model.last, model.count) == (eager.last, eager.count)
    assert model.last != 0.0


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda module, x: vars(module)["seen"].append(x.sum()), "in the attribute 'seen', in a container"),
        (lambda module, x: vars(module).update(seen=[x.sum(), module]), "in the attribute 'seen', in a container"),
        (lambda module, x: vars(module.weight).update(seen=x.sum()), "sets an attribute 'seen' of 'weight'"),
        (lambda module, x: vars(x).update(seen=1), r"sets an attribute 'seen' of 'batch\[0\]'"),
    ],
)
def test_what_no_step_keeps(keep: Callable[[Any, torch.Tensor], None], message: str) -> None:
    def kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keep(model, x)
        return model(x).square().mean()

    model = nn.Linear(4, 4)
    vars(model)["seen"] = []
    with pytest.raises(CaptureError, match=message):
        capture_train_step(kept, model, batches()[0], check=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, 2 * x],
        lambda x: {"sum": (x.sum(), None, 3), "item": x.mean().item()},
    ],
)
def test_containers_that_forward_makes(make: Callable[[torch.Tensor], Any]) -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.first = model.again = make(x)
        return model(x).square().mean()

    model, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second, *_ = batches()
    step = capture_train_step(loss_fn, model, first)
    step.check(second)
    assert not hasattr(model, "first")
    for x in (first, second):
        step(x)
        loss_fn(reference, x)
        kept, expected = (vars(each)["first"] for each in (model, reference))
        assert type(kept) is type(expected)
        assert are_alike(kept, expected, {})
        kept.clear()  # is the caller's
        assert vars(model)["again"]


class Growing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return super().forward(x).square().mean()


def test_a_buffer_that_gets_another_shape() -> None:
    with pytest.raises(
        CaptureError, match=r"^forward replaces buffer 'seen', torch.float32\[0, 4\] on cpu, by .*\[3, 4\]"
    ):
        capture_train_step(loss_fn, Growing(), batches()[0])


class Caching(nn.Module):
    """Generates with a cache, a module, as litgpt's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.cache is None else self.cache(x)
        return self.linear(x).square().mean()


def test_a_module_that_was_there_meanwhile() -> None:
    model, x = Caching(), batches()[0]
    step = capture_train_step(loss_fn, model, x, recapture=False)
    expected = step(x)
    model.cache = nn.Tanh()
    with pytest.raises(CaptureError, match=r"^the model had 2 modules"):
        step(x)
    model.cache = None
    assert torch.equal(step(x), expected)


class Noting(nn.Module):
    """Leaves what ``note`` makes of its input in an attribute, which it reads, or does not."""

    def __init__(self, note: Callable[[torch.Tensor], Any], reads: bool) -> None:
        super().__init__()
        self.linear, self.note, self.reads = nn.Linear(4, 4), note, reads
        self.noted: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.reads or self.noted is None:
            self.noted = self.note(x)
        return self.linear(x).square().mean()


@pytest.mark.parametrize("reads", [False, True])
def test_python_values_stay(reads: bool) -> None:
    step = capture_train_step(loss_fn, model := Noting(lambda x: [x.shape[0], "rows"], reads), batches()[0])
    assert model.noted is None
    step(batches()[0])
    assert model.noted == [3, "rows"]
    model.noted.append("of a user")
    model.noted = None if reads else model.noted
    step(batches()[0])
    assert model.noted == [3, "rows"]


def test_a_clock_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"attribute 'noted'"):
        capture_train_step(loss_fn, Noting(lambda x: time.perf_counter(), reads=False), batches()[0])
