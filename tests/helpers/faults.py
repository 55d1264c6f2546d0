"""A small model, and the faults that published debuggers of training inject, one process at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpasses.parity import ParityRecorder

STEP = 1  # the step in which faults strike


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale, self.drop = 0.5, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = ((q @ k.transpose(-1, -2)) * self.scale).softmax(-1)
        return self.out(self.drop(weights) @ v)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Embedding, two layers, batch norm, and a head that is tied to the embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@dataclass
class Trainer:
    """What trains, and what a fault may change before the step in which it strikes."""

    model: Any = field(default_factory=Model)
    label_smoothing: float = 0.0
    clip: bool = True
    num_updates_of_tied: int = 1
    batch: Callable[[Tensor], Tensor] = lambda tokens: tokens
    old: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, tokens.flatten(), label_smoothing=self.label_smoothing)

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.loss(self.model, tokens)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        for _ in range(self.num_updates_of_tied - 1):
            with torch.no_grad():
                self.model.emb.weight.add_(self.model.emb.weight.grad, alpha=-0.1)
        return loss


Fault = Callable[[Trainer], Any]


def train(
    path: Path, fault: Fault | None = None, *, operators: Sequence[int] = (STEP,), after: Fault | None = None
) -> Path:
    """Trains for three steps and records them; the fault strikes in the second one, or after its operators."""
    torch.manual_seed(0)
    trainer = Trainer()
    with ParityRecorder(path, operators=operators, overwrite=True) as recorder:
        for step in range(3):
            tokens = torch.randint(10, (3, 5), generator=torch.Generator().manual_seed(step))
            if step == STEP and fault is not None:
                fault(trainer)
            if step == 0:
                trainer.old = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            tokens = trainer.batch(tokens)
            with recorder.operators(step, trainer.model, [tokens]):
                loss = trainer.step(tokens)
            if step == STEP and after is not None:
                after(trainer)
            recorder.record(step, loss, trainer.model)
            trainer.optimizer.zero_grad()
    return path


def sets(fqn: str, name: str, value: Any) -> Fault:
    """A fault: another attribute of a module, or of the trainer."""
    return lambda trainer: setattr(trainer.model.get_submodule(fqn), name, value)


def gives(name: str, value: Any) -> Fault:
    return lambda trainer: setattr(trainer, name, value)


def runs(fqn: str, forward: Callable[[Any, nn.Module, Tensor], Tensor]) -> Fault:
    """A fault: a module that computes otherwise."""

    def strike(trainer: Trainer) -> None:
        module = trainer.model.get_submodule(fqn)
        module.forward = partial(forward, trainer, module)

    return strike


def changes_loss(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda trainer: setattr(trainer, "loss", lambda *given: change(Trainer.loss(trainer, *given)))


def optimizes(**options: Any) -> Fault:
    return lambda trainer: trainer.optimizer.param_groups[0].update(options)


def flips_bit(trainer: Trainer, module: nn.Module, x: Tensor) -> Tensor:
    result = F.gelu(x)
    with torch.no_grad():
        result.view(torch.int32)[0, 0, 0] ^= 1
    return result


def writes_nan(trainer: Trainer, module: nn.Module, x: Tensor) -> Tensor:
    result = F.gelu(x)
    with torch.no_grad():
        result[0, 0, 0].fill_(float("nan"))
    return result


def overwrites(trainer: Trainer, module: nn.Module, x: Tensor) -> Tensor:
    result = F.gelu(x)
    x.data.mul_(2)  # which autograd has saved, and does not see
    return result


def without_residual(trainer: Trainer, layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.norm(x))
    return layer.down(layer.act(layer.up(x)))


def detached(trainer: Trainer, layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.norm(x))
    return x + layer.down(layer.act(layer.up(x.detach())))


def other_order(trainer: Trainer, layer: Any, x: Tensor) -> Tensor:
    a = layer.attention(layer.norm(x))
    return x + (a + layer.down(layer.act(layer.up(x + a))))


def low_precision(trainer: Trainer, linear: Any, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16()).float()


def stale(trainer: Trainer, linear: Any, x: Tensor) -> Tensor:
    return F.linear(x, trainer.old["layers.1.down.weight"], linear.bias)
