"""Functions with a cache (``functools.lru_cache``) that a step calls: none keeps a tensor of a trace."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.state import kept_tensors

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
DIAGONAL = 0


@functools.lru_cache
def causal(n: int) -> torch.Tensor:
    return torch.tril(torch.ones(n, n), DIAGONAL)


@functools.cache
def in_containers(n: int) -> Any:
    return {"masks": [SimpleNamespace(causal=torch.tril(torch.ones(n, n)))], "n": n}


@functools.lru_cache(maxsize=1)
def transposed(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.T.shape)


@functools.cache
def one_object() -> SimpleNamespace:
    return SimpleNamespace()


def kept_in_an_old_object(y: torch.Tensor) -> torch.Tensor:
    one_object().mask = torch.tril(torch.ones(3, 3))
    gc.collect()  # moves the tensor to where Python's collector has the oldest objects
    return one_object().mask @ y


@functools.lru_cache
def width(n: int) -> tuple[int, str]:
    return 2 * n, "wide"


class Masks:
    @functools.lru_cache  # noqa: B019
    def causal(self, n: int) -> torch.Tensor:
        return torch.tril(torch.ones(n, n))


MASKS = Masks()
CACHED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
    "causal": (lambda y: causal(3) @ y, causal),
    "in_containers": (lambda y: in_containers(3)["masks"][0].causal @ y, in_containers),
    "Masks.causal": (lambda y: MASKS.causal(3) @ y, Masks.causal),
    "transposed": (lambda y: y * transposed(y)[0], transposed),
    "one_object": (kept_in_an_old_object, one_object),
}


@pytest.fixture(autouse=True)
def caches_empty() -> Iterator[None]:
    yield
    for cached in (causal, in_containers, transposed, one_object, width, Masks.causal):
        cached.cache_clear()
    globals()["DIAGONAL"] = 0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def loss_of(compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda model, x: compute(model(x)).square().mean()


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("check", [True, False])
def test_a_tensor_of_the_trace_is_refused_and_forgotten(name: str, check: bool) -> None:
    compute, cached = CACHED[name]
    one_object()
    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_of(compute), build(), X, check=check)
    assert str(error.value) == (
        f"{__name__}.{name} is a cached function (functools.lru_cache), and keeps a tensor that it made while the "
        "step was traced, which has no values. Its cache is empty again: call loss_fn once before the capture, so "
        "that it keeps a real one; a function that is called with tensors must not be cached"
    )
    assert cached.cache_info().currsize == 0


def test_a_function_that_was_frozen_is_found() -> None:
    gc.collect()
    gc.freeze()
    try:
        with pytest.raises(CaptureError, match=r"causal is a cached function"):
            capture_train_step(loss_of(CACHED["causal"][0]), build(), X)
    finally:
        gc.unfreeze()
    assert causal.cache_info().currsize == 0


def test_a_capture_that_fails_otherwise_leaves_none() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"not this way: {causal(3).shape}")

    with pytest.raises(ValueError, match="not this way"):
        capture_train_step(loss_fn, build(), X)
    assert causal.cache_info().currsize == 0


@pytest.mark.parametrize("name", ["causal", "in_containers", "Masks.causal"])
def test_a_cache_that_was_filled_before(name: str) -> None:
    compute, cached = CACHED[name]
    model, loss_fn = build(), loss_of(compute)
    loss = loss_fn(model, X)
    loss.backward()
    gradient, model.weight.grad = model.weight.grad, None
    step = capture_train_step(loss_fn, model, X)
    assert same_bits(step(X), loss.detach())
    assert same_bits(model.weight.grad, gradient)
    assert cached.cache_info().currsize == 1
    assert not same_bits(loss_of(lambda y: y)(model, X).detach(), loss.detach())


def test_caches_without_tensors_of_the_trace_are_left_alone() -> None:
    kept = causal(5)
    step = capture_train_step(loss_of(lambda y: y * width(y.shape[0])[0]), model := build(), X)
    assert same_bits(step(X), loss_of(lambda y: y * 6)(model, X).detach())
    assert (width.cache_info().currsize, causal.cache_info().currsize) == (1, 1)
    assert causal(5) is kept


def test_what_a_cached_function_reads_by_name() -> None:
    model, loss_fn = build(), loss_of(CACHED["causal"][0])
    loss_fn(model, X)
    step = capture_train_step(loss_fn, model, X, recapture=False)
    globals()["DIAGONAL"] = 1
    with pytest.raises(
        CaptureError,
        match=r"^'DIAGONAL' was 0 when the step was captured, and is 1 now; give it in the batch",
    ):
        step(X)


@pytest.mark.parametrize("check", [True, False])
def test_a_tensor_that_no_name_stands_for(check: bool) -> None:
    """The second call of ``loss_fn`` is the control: what it keeps at the first one is real."""
    masks: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if model not in masks:
            masks[model] = torch.tril(torch.ones(3, 3))
        return (masks[model] @ model(x)).mean()

    model = build()
    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, model, X, check=check)
    assert str(error.value) == (
        "a tensor of shape [3, 3], torch.float32, that was made while the step was traced, is kept by an object of "
        "weakref.WeakKeyDictionary; a captured step would not keep it. It has no values: remove it. If it is kept at "
        "the first call only, run loss_fn once before the capture"
    )
    masks.clear()
    loss = loss_fn(model, X).detach()
    assert same_bits(capture_train_step(loss_fn, model, X, check=check)(X), loss)


def test_a_cycle_that_nothing_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is young is collected: all that a process has takes a second; what traces a step leaves none."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [model(x)]
        cycle.append(cycle)
        return cycle[0].mean()

    collected, collector = [], SimpleNamespace(**vars(gc))
    collector.collect = lambda generation: (collected.append(generation), gc.collect(generation))
    monkeypatch.setattr(kept_tensors, "gc", collector)
    model = build()
    assert same_bits(capture_train_step(loss_fn, model, X)(X), loss_fn(model, X).detach())
    assert collected == [0]
    collected.clear()
    with fake_process_group(2):
        for other in (build(), fully_shard(build())):
            capture_train_step(lambda model, x: model(x).mean(), other, X, check=False)
    assert not collected
