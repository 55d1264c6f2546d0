"""What a step leaves in values that were there: it does so at each call, unless the next would read it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from sys import getswitchinterval, setswitchinterval
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses import capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.fsdp import BucketPlan
from graphpasses.identity import containers_with_copies, same_bits
from graphpasses.parity import weight_hash
from graphpasses.simulate import Topology, run_cluster
from graphpasses.state.keys import key_of
from graphpasses.state.patterns import Known, filled, misfit, pattern_of, walk

X = torch.arange(24.0).view(6, 4) / 24


class State:
    """An object that a module holds, or that stands outside."""

    def __init__(self) -> None:
        self.last: Any = None


class Twin(NamedTuple):
    """A model, what keeps something of its steps, and the loss."""

    model: nn.Module
    kept: Any
    loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Keeping(nn.Linear):
    def __init__(self, keep: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.keep, self.kept, self.state = keep, {"v": 0.0}, State()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.keep(self, out)
        return out


def loss_of_model(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def by_hook(keep: Callable[[Any, torch.Tensor], Any], kept: Any) -> Twin:
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, out: keep(kept, out))
    return Twin(model, kept, loss_of_model)


def in_loss(keep: Callable[[Any, torch.Tensor], Any], kept: Any) -> Twin:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of_model(model, x)
        keep(kept, loss)
        return loss

    return Twin(nn.Linear(4, 4), kept, loss_fn)


def in_module(keep: Callable[[Any, torch.Tensor], Any], name: str) -> Twin:
    model = Keeping(keep)
    return Twin(model, getattr(model, name), loss_of_model)


def in_cell() -> Twin:
    last: Any = None

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = loss_of_model(model, x)
        return last

    return Twin(nn.Linear(4, 4), lambda: last, loss_fn)


def reset_and_counted(kept: list[Any], out: torch.Tensor) -> None:
    kept.clear()
    kept.extend([out, len(kept), {"mean": out.mean().item()}])


def integrated(module: Any, out: torch.Tensor) -> None:
    """As a spiking neuron, which begins anew in each step."""
    module.kept["v"] = 0.0
    for _ in range(3):
        module.kept["v"] = 0.5 * module.kept["v"] + out


def counted(module: Any, out: torch.Tensor) -> None:
    module.state.last = (module.state.last or 0) + 1


def by_partial() -> Twin:
    kept: dict[str, torch.Tensor] = {}
    model = nn.Linear(4, 4)
    model.register_forward_hook(partial(lambda module, args, out, features: features.update(out=out), features=kept))
    return Twin(model, kept, loss_of_model)


FOLLOWED: dict[str, Callable[[], Twin]] = {
    "a running mean": lambda: in_loss(
        lambda kept, loss: kept.update(mean=0.9 * kept["mean"] + 0.1 * loss.item()), {"mean": 0.0}
    ),
    "dict of a hook": lambda: by_hook(lambda kept, out: kept.update(out=out), {}),
    "dict of a hook, filled": lambda: by_hook(lambda kept, out: kept.update(out=out), {"out": torch.ones(2)}),
    "object of a hook": lambda: by_hook(lambda kept, out: setattr(kept, "last", out), State()),
    "list": lambda: by_hook(reset_and_counted, []),
    "list that grows": lambda: by_hook(lambda kept, out: kept.append(out), []),
    "queue": lambda: by_hook(lambda kept, out: kept.append(out), deque([1.0], maxlen=1)),
    "default dict": lambda: in_loss(lambda kept, loss: kept.update(loss=loss), defaultdict(list)),
    "list in a list": lambda: by_hook(lambda kept, out: kept[0].__setitem__(0, out), [[0], 1]),
    "beside another": lambda: by_hook(lambda kept, out: kept.update(out=out), {"mask": torch.ones(2), "out": None}),
    "argument of a hook": by_partial,
    "set": lambda: by_hook(lambda kept, out: kept.add("ran"), set()),
    "new attribute": lambda: by_hook(lambda kept, out: setattr(kept, "new", out), SimpleNamespace()),
    "number": lambda: in_loss(lambda kept, loss: kept.update(loss=loss.item()), {"loss": 0.0}),
    "cell": in_cell,
    "dict of a module": lambda: in_module(lambda module, out: module.kept.update(v=out), "kept"),
    "dict that is reset": lambda: in_module(integrated, "kept"),
    "object of a module": lambda: in_module(lambda module, out: setattr(module.state, "last", out), "state"),
    "flag of an object": lambda: in_module(lambda module, out: setattr(module.state, "last", "ran"), "state"),
}


def values_of(kept: Any) -> list[Any]:
    """Returns what is kept; tensors by their bits."""
    kept = kept() if callable(kept) else vars(kept) if isinstance(kept, (State, SimpleNamespace)) else kept
    leaves = [each for each in walk(kept).values() if not isinstance(each, (dict, list, tuple, deque))]
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in leaves]


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("build", FOLLOWED.values(), ids=FOLLOWED)
def test_a_step_leaves_what_eager_leaves(build: Callable[[], Twin], rewritten: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = build(), build()
    theirs.model.load_state_dict(ours.model.state_dict())
    before = values_of(ours.kept)
    step = capture_train_step(ours.loss_fn, ours.model, X)
    step = default_pipeline(BucketPlan.from_modules([])).run(step) if rewritten else step
    step.check(2 * X)
    assert values_of(ours.kept) == before
    found = []
    for scale in (1.0, 2.0, 3.0):
        loss, expected = step(scale * X), theirs.loss_fn(theirs.model, scale * X)
        assert same_bits(loss, expected)
        found.append(str(values_of(ours.kept)))
        assert found[-1] == str(values_of(theirs.kept))
    assert found[0] != found[1] or "ran" in found[0]


REFUSED: dict[str, Callable[[], Twin]] = {
    "grows and is asked": lambda: by_hook(lambda kept, out: kept.append(out * len(kept)), []),
    "asks for the last": lambda: by_hook(
        lambda kept, out: kept.update(out=out if kept["out"] is None else kept["out"] + out), {"out": None}
    ),
    "asks if there is one": lambda: by_hook(
        lambda kept, out: kept.update(out=out if kept["out"] is None else 2 * out), {"out": None}
    ),
    "another object": lambda: in_module(lambda module, out: setattr(module.state, "last", State()), "state"),
    "a weight": lambda: in_module(lambda module, out: module.kept.update(v=module.weight), "kept"),
    "a module": lambda: in_module(lambda module, out: module.kept.update(v=nn.ReLU()), "kept"),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_what_a_step_would_leave_otherwise(build: Callable[[], Twin]) -> None:
    twin = build()
    before = values_of(twin.kept)
    messages = "the code of the step changes it", "in the attribute 'kept', in a container", "what it keeps in"
    with pytest.raises(CaptureError, match="|".join(messages)):
        capture_train_step(twin.loss_fn, twin.model, X)
    assert values_of(twin.kept) == before


def test_what_was_there_when_a_step_was_captured() -> None:
    """The step may run on that, and on what it left; not on something else."""
    kept: dict[str, Any] = {}
    twin = by_hook(lambda kept, out: kept.update(out=out), kept)
    step = capture_train_step(twin.loss_fn, twin.model, X, recapture=False)
    for change in (lambda: None, kept.clear):
        change()
        step(X)
        assert same_bits(kept["out"], twin.model(X))
    kept["more"] = 1
    with pytest.raises(CaptureError, match=r"^\"kept\['more'\]\" was absent when the step was captured, and"):
        step(X)


def test_what_somebody_else_puts_beside_what_a_step_leaves() -> None:
    kept: tuple[dict[str, torch.Tensor], int] = {}, 0

    def keep(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept[0]["out"] = out
        return sum(kept[0].values(), torch.zeros(()))

    model = nn.Linear(4, 4)
    model.register_forward_hook(keep)
    step = capture_train_step(loss_of_model, model, X, recapture=False)
    step(X)
    kept[0]["more"] = torch.ones(1)
    with pytest.raises(CaptureError, match="was absent when the step was captured, and is a tensor now"):
        step(X)


def test_a_decision_that_what_was_left_takes_away() -> None:
    kept: dict[str, Any] = {}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of_model(model, x)
        if not kept and x.sum() > 0:
            kept["first"] = True
        return loss

    with pytest.raises(CaptureError, match="the code of the step changes it"):
        capture_train_step(loss_fn, nn.Linear(4, 4), X)


def test_patterns() -> None:
    one, other, mask = torch.ones(1), torch.zeros(2), torch.ones(3)
    kept: dict[str, Any] = {"mask": mask, "n": 1}
    copies = containers_with_copies(kept)
    kept["a"] = other
    found = pattern_of("kept", kept, copies)
    assert found is not None
    pattern, parts = found
    assert parts == {"kept[0]": other}
    assert not misfit({"mask": mask, "n": 1, "a": one}, pattern)
    assert misfit({"mask": mask, "n": True, "a": one}, pattern)
    assert misfit({"mask": mask, "n": 1, "a": 1.0}, pattern)
    assert misfit({"mask": one, "n": 1, "a": one}, pattern)
    assert misfit({"mask": mask, "n": 1}, pattern)
    assert filled(pattern, kept, {"kept[0]": one}) is kept
    assert kept == {"mask": mask, "n": 1, "a": one}
    assert pattern_of("kept", kept, copies, known=Known([one])) is None
    kept["self"] = kept
    assert pattern_of("kept", kept, copies) is None


def sharded(is_captured: bool) -> list[Any]:
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dict[str, Any]()
    model[0].register_forward_hook(lambda module, args, out: kept.update(out=out))
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of_model(model, x) + kept["out"].square().mean()
        kept["loss"] = loss.item()
        return loss

    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), list[Any]()
    step = default_pipeline().run(capture_train_step(loss_fn, model, X, optimizer=optimizer)) if is_captured else None
    for scale in (1.0, 2.0, 3.0):
        if step is not None:
            found.append(step(scale * X).item())
        else:
            (loss := loss_fn(model, scale * X)).backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found += [kept["out"].tolist(), kept["loss"]]
    return [*found, weight_hash(model)]


def both() -> list[Any]:
    return [sharded(is_captured) for is_captured in (False, True)]


def test_a_list_in_the_place_of_a_tuple_of_the_same_items() -> None:
    model = Keeping(lambda module, out: setattr(module, "kept", [1, 2]))
    model.kept = (1, 2)
    step = capture_train_step(loss_of_model, model, X)
    assert model.kept == (1, 2)
    step(X)
    assert model.kept == [1, 2]


def test_what_hooks_of_a_sharded_model_keep() -> None:
    for eager, captured in run_cluster(both, Topology(2, gpus_per_node=2)):
        assert captured == eager


def test_a_size_that_varies() -> None:
    kept: dict[str, Any] = {}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.size, kept["shapes"] = x.shape, [x.shape, 2 * x.shape[0]]  # type: ignore[assignment]
        return loss_of_model(model, x)

    model = nn.Linear(4, 4)
    step = capture_train_step(loss_fn, model, X, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
    for num_rows in (6, 3):
        step(X[:num_rows])
        assert (model.size, kept) == (
            torch.Size([num_rows, 4]),
            {"shapes": [torch.Size([num_rows, 4]), 2 * num_rows]},
        )


def test_a_dict_to_which_another_thread_adds() -> None:
    kept: dict[str, Any] = {"scale": 2.0, "last": torch.zeros(4)}
    ends, before = Event(), getswitchinterval()

    def add() -> None:
        for number in count():
            if ends.is_set():
                return
            kept[f"logged{number % 99}"] = kept.pop(f"logged{(number - 9) % 99}", number)

    setswitchinterval(1e-6)
    thread = Thread(target=add)
    thread.start()
    try:
        found = [(key_of(kept), pattern_of("kept", kept)) for _ in range(300)]
    finally:
        ends.set()
        thread.join()
        setswitchinterval(before)
    assert len({len(key.items) for key, _ in found}) > 1  # it was changed meanwhile
    assert all(left is not None and [*left[1]] == ["kept[0]"] for _, left in found)
