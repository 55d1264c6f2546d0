"""Settings of torch that a graph has built in: a call refuses that they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.state.snapshot import settings_of
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)[None, None]
    return nn.functional.scaled_dot_product_attention(y, y, y).square().mean()


@contextmanager
def changed(change: Callable[[Any], object], before: Any, after: Any) -> Iterator[None]:
    change(after)
    try:
        yield
    finally:
        change(before)


@pytest.mark.parametrize(
    ("make", "name", "before", "after"),
    [
        (
            lambda: changed(torch.set_default_dtype, torch.float32, torch.float64),
            "torch.get_default_dtype()",
            "torch.float32",
            "torch.float64",
        ),
        (
            lambda: changed(torch.use_deterministic_algorithms, False, True),
            "torch.are_deterministic_algorithms_enabled()",
            "False",
            "True",
        ),
        (lambda: torch.device("meta"), "torch.get_default_device()", "cpu", "meta"),
        (
            lambda: sdpa_kernel([SDPBackend.MATH]),
            "torch.backends.cuda.flash_sdp_enabled()",
            "True",
            "False",
        ),
        (
            lambda: torch.backends.cudnn.flags(enabled=False),
            "'torch.backends.cudnn.enabled'",
            "True",
            "False",
        ),
        (
            lambda: changed(torch.backends.mkldnn.set_flags, True, False),
            "'torch.backends.mkldnn.enabled'",
            "True",
            "False",
        ),
    ],
)
def test_settings_that_a_graph_has_built_in(
    make: Callable[[], Any], name: str, before: str, after: str
) -> None:
    step = capture_train_step(loss_fn, nn.Linear(4, 4), X)
    expected = step(X)
    with make(), pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value) == (
        f"{name} was {before} when the step was captured, and is {after} now; capture the step again, or undo the "
        "change"
    )
    assert same_bits(step(X), expected)


def test_a_device_without_autocast() -> None:
    """``read_traced_result`` takes models on meta."""
    slots = {
        slot.path: slot
        for owner in settings_of(nn.Linear(1, 1, device="meta"))
        for slot in owner.slots.values()
    }
    assert slots["autocast on 'meta'"].value is None


def test_the_kernel_of_attention_is_chosen_at_the_capture() -> None:
    """Why these settings count."""
    targets = []
    for backends in ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(backends):
            step = capture_train_step(loss_fn, nn.Linear(4, 4), X)
            step(X)
        targets.append({str(node.target) for node in step.graph.nodes if "attention" in str(node.target)})
    assert targets[0] != targets[1]
