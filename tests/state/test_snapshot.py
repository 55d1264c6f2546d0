"""Settings of torch that a graph has built in: a call refuses that they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.state.snapshot import settings_of
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)[None, None]
    return nn.functional.scaled_dot_product_attention(y, y, y).square().mean()


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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
        (
            lambda: changed(partial(torch.set_autocast_dtype, "cpu"), torch.bfloat16, torch.float16),
            "torch.get_autocast_dtype('cpu')",
            "torch.bfloat16",
            "torch.float16",
        ),
        (
            lambda: changed(torch.set_autocast_cache_enabled, True, False),
            "torch.is_autocast_cache_enabled()",
            "True",
            "False",
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
        (
            lambda: saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float),
            "'torch.autograd.graph.saved_tensors_hooks'",
            "()",
            "a tuple of 2",
        ),
        (
            parametrize.cached,
            "torch.nn.utils.parametrize.cached()",
            "False",
            "True",
        ),
        (
            Watching,
            "the TorchFunctionModes that are on",
            "()",
            "('tests.state.test_snapshot.Watching')",
        ),
        (
            lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
            "torch.is_anomaly_enabled()",
            "False",
            "True",
        ),
    ],
)
def test_settings_that_a_graph_has_built_in(make: Callable[[], Any], name: str, before: str, after: str) -> None:
    step = capture_train_step(loss_fn, nn.Linear(4, 4), X, recapture=False)
    expected = step(X)
    with make(), pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value) == (
        f"{name} was {before} when the step was captured, and is {after} now; capture the step again, or undo the "
        "change"
    )
    assert same_bits(step(X), expected)


def put_into(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (lambda scale: put_into(scale, torch.ones(3, 4)), "[3, 4] torch.float32 on cpu, strides [4, 1]"),
        (
            lambda scale: scale.requires_grad_(),
            "[1, 4] torch.float32 on cpu, strides [4, 1], which requires a gradient",
        ),
    ],
)
def test_tensors_from_outside_that_become_others(change: Callable[[torch.Tensor], None], after: str) -> None:
    model, scale = nn.Linear(4, 1), torch.ones(1, 4)
    step = capture_train_step(lambda model, x: model(x * scale).sum() / len(scale), model, X, recapture=False)
    put_into(scale, 2 * scale)
    assert same_bits(step(X), model(2 * X).sum().detach())
    change(scale)
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value) == (
        "a tensor from outside that loss_fn reads was '[1, 4] torch.float32 on cpu, strides [4, 1]' when the step "
        f"was captured, and is '{after}' now; capture the step again, or undo the change"
    )


def test_a_device_without_autocast() -> None:
    """``read_traced_result`` takes models on meta."""
    slots = {
        slot.path: slot for owner in settings_of(nn.Linear(1, 1, device="meta")) for slot in owner.slots.values()
    }
    assert slots["autocast on 'meta'"].value is None


def test_the_kernel_of_attention_is_chosen_at_the_capture() -> None:
    """Why these settings count."""
    targets = []
    for backends in ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(backends):
            step = capture_train_step(loss_fn, nn.Linear(4, 4), X, recapture=False)
            step(X)
        targets.append({str(node.target) for node in step.graph.nodes if "attention" in str(node.target)})
    assert targets[0] != targets[1]


def step_of(weight: DTensor) -> tuple[nn.Linear, Any]:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(weight)
    step = capture_train_step(lambda model, x: (x @ model.weight.full_tensor()).mean(), model, X, recapture=False)
    step(X)
    return model, step


def test_placements_of_a_parameter_that_become_others() -> None:
    """Its parts on each rank are as large, and eager adds them up."""
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        replicated, partial = (
            DTensor.from_local(torch.ones(4, 4), mesh, [each]) for each in (Replicate(), Partial())
        )
        model, step = step_of(replicated)
        model.weight = nn.Parameter(partial)
        kind = "torch.float32[4, 4] on cpu, strides [4, 1]"
        with pytest.raises(CaptureError) as error:
            step(X)
    assert str(error.value) == (
        f"'weight' was {kind}, (Replicate(),) of {mesh} when the step was captured, and is {kind}, (Partial(sum),) "
        f"of {mesh} now; capture the step again, or undo the change"
    )


def test_a_parameter_that_is_on_another_mesh() -> None:
    """Eager gathers it of other ranks."""
    with fake_process_group(4):
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")) for _ in range(2)]
        weights = [DTensor.from_local(torch.ones(2, 4), meshes[0][name], [Shard(0)]) for name in ("rows", "columns")]
        model, step = step_of(weights[0])
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), meshes[1]["rows"], [Shard(0)]))
        step(X)
        model.weight = nn.Parameter(weights[1])
        with pytest.raises(CaptureError, match=r"of DeviceMesh\(\(columns=2\), .* now; capture the step again"):
            step(X)
