"""Random numbers of a captured step are eager's, also those that checkpointing draws again in backward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphpasses import BucketPlan, default_pipeline
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import CapturedStep
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE, read_states

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Checkpointed(nn.Module):
    """Three linears; the first two, and what follows them, are computed again in backward."""

    def __init__(self, dropout: float, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout, self.options = dropout, {"use_reentrant": False, **options}

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(layer(x), self.dropout).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = checkpoint(self.block, layer, x, **self.options)
        return nn.functional.dropout(self.layers[2](x), self.dropout)


class CheckpointedAttention(Checkpointed):
    """Its operator says that it draws random numbers, and draws none."""

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y)[0, 0]


def differing(step: CapturedStep, eager: nn.Module, x: torch.Tensor = X) -> list[str]:
    """Trains both for three steps from one seed, and names what differs at the end."""
    models = {"captured": step.model, "eager": eager}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    states = {}
    for name, model in models.items():
        torch.manual_seed(1)
        for _ in range(3):
            optimizers[name].zero_grad()
            if name == "eager":
                loss = loss_fn(model, x)
                loss.backward()
            else:
                loss = step(x)
            losses[name].append(loss.item())
            optimizers[name].step()
        states[name] = read_states()
    return [
        *(["losses"] if losses["captured"] != losses["eager"] else []),
        *(key for key, state in states["eager"].items() if not torch.equal(states["captured"][key], state)),
        *(
            fqn
            for (fqn, p), q in zip(step.model.named_parameters(), eager.parameters(), strict=True)
            if not torch.equal(p.grad, q.grad)
        ),
    ]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Checkpointed(0.5),
    "no dropout": lambda: Checkpointed(0.0),
    "other random numbers": lambda: Checkpointed(0.5, preserve_rng_state=False),
    "attention": lambda: CheckpointedAttention(0.0),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints(name: str, device: str) -> None:
    x = X.to(device)
    step = capture_train_step(loss_fn, MODELS[name]().to(device), x)
    assert not differing(step, MODELS[name]().to(device), x)
    states = [node for node in step.graph.nodes if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE)]
    # Forward reads; backward reads, sets forward's, and sets back.
    assert len(states) == ((2 if device == "cpu" else 4) * 4 if name == "dropout" else 0)


def test_control_without_the_state() -> None:
    step = capture_train_step(loss_fn, Checkpointed(0.5), X)
    for node in step.graph.find_nodes(op="call_function", target=SET_RANDOM_STATE):
        step.graph.erase_node(node)
    step.module.recompile()
    assert "layers.1.bias" in differing(step, Checkpointed(0.5))


def test_the_state_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for one: the graph has calls with its device, which draw the same numbers again."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cpu, "default_generators", (torch.default_generator,), raising=False)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cpu, name, getattr(torch, name), raising=False)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = torch.cpu.get_rng_state()
        y = nn.functional.dropout(model(x))
        torch.cpu.set_rng_state(state)
        return (y * nn.functional.dropout(model(x))).mean()

    model = nn.Linear(4, 4)
    step = capture_train_step(loss_fn, model, X)
    (read,), (written,) = (
        step.graph.find_nodes(op="call_function", target=target) for target in (READ_RANDOM_STATE, SET_RANDOM_STATE)
    )
    assert read.args == (torch.device("cpu", 0),)
    assert written.args == (read, torch.device("cpu", 0))
    step.check(X)
    step.graph.erase_node(written)
    step.module.recompile()
    with pytest.raises(FidelityError, match="computes another loss than eager"):
        step.check(X)


def test_a_seed_in_the_loss() -> None:
    def seeded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return nn.functional.dropout(model(x)).square().mean()

    with pytest.raises(CaptureError) as caught:
        capture_train_step(seeded, nn.Linear(4, 1), X)
    assert str(caught.value) == (
        "loss_fn calls torch.manual_seed, and aten.bernoulli_.float draws from its generator; a captured step would "
        "not seed again. Seed before the step"
    )


def test_a_seed_from_which_the_next_step_draws() -> None:
    def seeded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return loss_fn(model, x)

    with pytest.raises(FidelityError, match=r"computes another state of the random numbers \(cpu\) than eager"):
        capture_train_step(seeded, nn.Linear(4, 1), X)


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python's random"), (numpy.random.rand, "numpy.random")],
    ids=["random", "numpy"],
)
def test_random_numbers_of_others(draw: Callable[[], float], name: str) -> None:
    def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, x) * draw()

    state = draw.__self__.getstate() if name == "Python's random" else numpy.random.get_state()[1].tobytes()
    with pytest.raises(CaptureError) as caught:
        capture_train_step(noisy, nn.Linear(4, 1), X)
    assert str(caught.value) == (
        f"loss_fn draws random numbers of {name}, and a captured step would repeat those of its capture. Draw them "
        "with torch, or outside, and give them in the batch"
    )
    after = draw.__self__.getstate() if name == "Python's random" else numpy.random.get_state()[1].tobytes()
    assert after == state


@pytest.mark.parametrize(
    "generator",
    [random.Random(3), numpy.random.default_rng(3), numpy.random.RandomState(3)],
    ids=["random", "numpy", "former"],
)
def test_random_numbers_of_a_generator_of_ones_own(generator: Any) -> None:
    twin = copy.deepcopy(generator)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if model.training else generator.uniform(0.0, 1.0)
        return loss_fn(model, x) * scale

    step = capture_train_step(loss, model := nn.Linear(4, 1), X)
    generator.uniform(0.0, 1.0)
    step(X)
    twin.uniform(0.0, 1.0)
    with pytest.raises(CaptureError, match=r"^loss_fn draws random numbers of 'generator', "):
        capture_train_step(loss, model.eval(), X, check=False)
    assert generator.uniform(0.0, 1.0) == twin.uniform(0.0, 1.0)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_generator_that_is_seeded_in_the_loss(is_new: bool) -> None:
    held = torch.Generator()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        generator = (torch.Generator() if is_new else held).manual_seed(0)
        return model(x).mean() * torch.rand((), generator=generator)

    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, nn.Linear(4, 1), torch.ones(2, 4))
    assert str(error.value) == (
        "loss_fn makes or seeds a torch.Generator, and a captured step would draw on from the one of its capture. "
        "Make and seed it before the step, or give the random numbers in the batch"
    )


def test_a_generator_of_ones_own() -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    losses = [
        lambda model, x, g=g: model(x + torch.randn(x.shape, generator=g)).mean() * torch.rand((), generator=g)
        for g in generators
    ]
    step = capture_train_step(losses[0], model, x)
    for _ in range(2):
        assert torch.equal(step(x), losses[1](model, x).detach())


def test_an_operator_that_is_named_by_a_keyword() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        columns = torch.zeros(4, dtype=torch.long).random_(1, 3)  # aten.random_.from
        return model(x)[:, columns].square().mean()

    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    step = default_pipeline(BucketPlan.from_modules([])).run(capture_train_step(loss_fn, model, x))
    for seed in range(3):
        torch.manual_seed(seed)
        loss = step(x)
        torch.manual_seed(seed)
        assert torch.equal(loss, loss_fn(model, x))
