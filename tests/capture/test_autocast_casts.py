"""A weight that autocast casts once in eager is cast once in graphs, and its gradients are added alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import CaptureError, FidelityError, UnsupportedError
from tests.helpers.models import make_mesh

pytestmark = pytest.mark.slow
Call = Callable[[Tensor], Tensor]


class Shared(nn.Module):
    """Uses a layer several times; ``way`` says how."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self._way = way

    def forward(self, x: Tensor) -> Tensor:
        return self._way(self, x)


def autocast(cache_enabled: bool | None = None) -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)


def thrice(model: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = model.norm(torch.tanh(model.layer(x)))
    return x


def without_norm(model: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(model.layer(x))
    return x


def inside(model: Any, x: Tensor) -> Tensor:
    with autocast():
        return thrice(model, x)


def without_gradients_first(model: Any, x: Tensor) -> Tensor:
    with autocast():
        with torch.no_grad():
            x = x + model.layer(x)
        return thrice(model, x)


def in_two_blocks(model: Any, x: Tensor) -> Tensor:
    with autocast():
        x = torch.tanh(model.layer(x))
    with autocast():
        return thrice(model, x)


def cast_by_hand(model: Any, x: Tensor) -> Tensor:
    with autocast():
        for _ in range(2):
            x = torch.tanh(x.bfloat16() @ model.layer.weight.to(torch.bfloat16))
        return x


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: thrice(model, x), x, use_reentrant=False)


def broken(model: Any, x: Tensor) -> Tensor:
    with autocast():
        x = torch.tanh(model.layer(x))
        torch._dynamo.graph_break()
        return model.layer(x)


def around(call: Call, x: Tensor) -> Tensor:
    with autocast():
        return call(x)


def around_without_a_cache(call: Call, x: Tensor) -> Tensor:
    with autocast(cache_enabled=False):
        return call(x)


def two_calls(call: Call, x: Tensor) -> Tensor:
    with autocast():
        return call(x) * call(-x)


def two_blocks(call: Call, x: Tensor) -> Tensor:
    return around(call, x) * around(call, -x)


def directly(call: Call, x: Tensor) -> Tensor:
    return call(x)


def gradients(way: Any, use: Any, wrap: Callable[[nn.Module], Any]) -> list[Tensor | None]:
    torch._dynamo.reset()
    model = Shared(way)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    loss = use(wrap(model), x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compiled(model: nn.Module) -> Any:
    return gp.compile(model, inner="aot_eager")


@pytest.mark.parametrize(
    ("way", "use", "torch_is_right"),
    [
        (inside, directly, False),
        (thrice, around, False),
        (without_norm, two_blocks, False),
        (without_gradients_first, directly, False),
        (in_two_blocks, directly, False),
        (thrice, around_without_a_cache, True),
        (checkpointed, around_without_a_cache, True),
        (cast_by_hand, directly, True),
        (lambda model, x: model.layer(x), around, True),
    ],
)
def test_gradients_are_eagers(way: Any, use: Any, torch_is_right: bool) -> None:
    """Control: where a weight is cast once for several uses, ``torch.compile`` alone has other bits."""
    expected = gradients(way, use, lambda model: model)
    assert same(gradients(way, use, compiled), expected)
    alone = gradients(way, use, lambda model: torch.compile(model, backend="aot_eager"))
    assert same(alone, expected) == torch_is_right


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after a break
@pytest.mark.parametrize(("way", "use"), [(thrice, two_calls), (broken, directly), (broken, around)])
def test_casts_in_several_graphs_are_refused(way: Any, use: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"two compiled graphs use parameter .*weight' under"):
        gradients(way, use, compiled)


def test_calls_without_gradients_may_share_an_autocast() -> None:
    with torch.no_grad(), autocast():
        model = Shared(thrice)
        call, x = compiled(model), torch.randn(4, 8)
        for _ in range(2):
            assert torch.equal(call(x), model(x))


def test_a_checkpointed_function_with_several_uses_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="in a checkpointed function"):
        gradients(checkpointed, around, compiled)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


@pytest.mark.parametrize("way", [inside, without_gradients_first, in_two_blocks, checkpointed, cast_by_hand])
@pytest.mark.parametrize("cache_enabled", [None, False])
def test_a_captured_step(way: Any, cache_enabled: bool | None) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with autocast(cache_enabled):
            return mean_square(model, x)

    eager, model = Shared(way), Shared(way)
    loss_fn(eager, x).backward()
    gp.capture_train_step(loss_fn, model, x, check=False)(x)
    found, expected = ([each.grad for each in one.parameters()] for one in (model, eager))
    assert same(found, expected)


def test_the_cache_changes_bits() -> None:
    """Control of the test above."""
    kept, cast_anew = (gradients(thrice, use, lambda model: model) for use in (around, around_without_a_cache))
    assert not same(kept, cast_anew)


def test_a_step_inside_of_autocast_is_refused() -> None:
    """Eager trains on with the casts of the first weights there."""
    with autocast(), pytest.raises(CaptureError) as caught:
        gp.capture_train_step(mean_square, nn.Linear(3, 3), torch.randn(4, 3))
    assert str(caught.value) == (
        "autocast is on around the step, and keeps a weight's cast from call to call. Enter it in loss_fn, or "
        "torch.autocast(..., cache_enabled=False) in both runs"
    )


def test_a_sharded_model_is_refused() -> None:
    with fake_process_group(4), pytest.raises(CaptureError, match="loss_fn runs a sharded model under autocast"):
        gp.capture_train_step(around, fully_shard(nn.Linear(3, 3), mesh=make_mesh()), torch.randn(4, 3))


def float32_part(model: Any, x: Tensor) -> Tensor:
    x = model.layer(x)
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(x.float() @ model.norm.weight.diag())


def gradients_around(way: Any, compiled: Callable[[nn.Module], nn.Module], *, is_inside: bool) -> list[Tensor]:
    """Returns gradients of a forward in a block of autocast, and of backward in it or after it."""
    model, x = Shared(way), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    with autocast():
        loss = compiled(model)(x).square().mean()
        if is_inside:
            loss.backward()
    if not is_inside:
        loss.backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_backward_runs_after_the_block_of_autocast() -> None:
    eager = gradients_around(float32_part, lambda model: model, is_inside=False)
    ours = gradients_around(float32_part, lambda model: gp.compile(model, inner="aot_eager"), is_inside=False)
    torchs = gradients_around(float32_part, lambda model: torch.compile(model, backend="aot_eager"), is_inside=False)
    assert all(map(torch.equal, eager, ours))
    assert not all(map(torch.equal, eager, torchs))


def test_backward_in_the_block_of_autocast() -> None:
    def compiled(model: nn.Module) -> nn.Module:
        return gp.compile(model, inner="aot_eager")

    eager = gradients_around(without_norm, lambda model: model, is_inside=True)
    assert all(map(torch.equal, eager, gradients_around(without_norm, compiled, is_inside=True)))
    with pytest.raises(FidelityError, match=r"casts what aten\.mm\.default \(.*Call backward after the block"):
        gradients_around(float32_part, compiled, is_inside=True)


def test_a_function_that_makes_tensors_of_its_own() -> None:
    model = nn.EmbeddingBag(8, 4, mode="sum")
    found = []
    for call in (model, compiled(model)):
        with autocast():
            result = call(torch.arange(6).view(2, 3))  # whose offsets are made by `arange`
        result.sum().backward()
        found.append([result, model.weight.grad])
        model.weight.grad = None
    assert same(*found)
