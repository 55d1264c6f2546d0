"""A training program that is right, one mistake in it, and what must be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.faults.models import NUM_TOKENS, Model
from graphpasses.parity import ParityRecorder, ReplicaMismatchError

__all__ = ["BEGINNING", "Answer", "Fault", "Phase", "Training", "on_rank"]

Phase = Literal["start", "forward", "loss", "backward", "gradients", "reduction", "optimizer"]
"""Where in a step: "gradients" is what is done to them between backward and the optimizer."""
BEGINNING: Phase = "start"


class Training:
    """A training program; a fault overrides one of its methods or settings."""

    num_steps = 2
    lr = 0.1
    per_rank: Sequence[str] = ()  # names of tensors of which each rank has its own

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.model: Any = self.make_model()
        self.prepare()
        self.optimizer = self.make_optimizer()
        self.old = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.seed()

    def make_model(self) -> nn.Module:
        return Model()

    def prepare(self) -> None:
        """Changes the model before its optimizer is made."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def seed(self) -> None:
        torch.manual_seed(100 + self.rank)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        return torch.randint(NUM_TOKENS, (3, 5), generator=generator)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def labels(self, tokens: Tensor) -> Tensor:
        return tokens.roll(-1, 1)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), self.labels(tokens).flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self) -> None:
        """Reduces the gradients over ranks."""

    def clip(self) -> None:
        """Does what is done to gradients before the optimizer."""

    def update(self) -> None:
        self.optimizer.step()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        self.backward(loss)
        self.reduce()
        self.clip()
        self.update()
        return loss

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def train(self, path: Path) -> None:
        """Trains and records all operators; ends where replicas differ, as a user's run would."""
        try:
            with ParityRecorder(
                path, operators=range(self.num_steps), overwrite=True, per_rank=self.per_rank
            ) as recorder:
                for index in range(self.num_steps):
                    tokens = self.batch(index)
                    with recorder.operators(index, self.model, [tokens]):
                        loss = self.step(tokens)
                    recorder.record(index, loss, self.model)
                    self.zero_grad()
        except ReplicaMismatchError:
            return


@dataclass(frozen=True)
class Answer:
    """What must be named.

    Args:
        phase: of the step.
        operator: its name; of the beginning, the value that differs.
        module: FQN of the module; empty for none.
        ranks: the ranks of which one must be named.
    """

    phase: Phase
    operator: str
    module: str = ""
    ranks: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        of = f" of {self.module}" if self.module else ""
        return f"{self.operator}, {self.phase}{of}, rank {' or '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        name: of the row.
        source: where faults of its kind were published: "TTrace", "TrainCheck"; or "tried".
        healthy: the program without it.
        changes: what the faulty program overrides.
        answer: what must be named.
        num_ranks: 1 or 2.
    """

    name: str
    source: str
    healthy: type[Training]
    changes: Mapping[str, Any]
    answer: Answer
    num_ranks: int = field(default=1)

    @property
    def faulty(self) -> type[Training]:
        """The program with the fault."""
        return type("Faulty", (self.healthy,), dict(self.changes))


def on_rank(rank: int, faulty: Callable[[Any], object], healthy: Callable[[Any], object] | None = None) -> Any:
    """Returns a method that does otherwise on one rank.

    Args:
        rank: it.
        faulty: what is done there.
        healthy: what is done elsewhere; nothing by default.
    """

    def method(self: Any) -> object:
        chosen = faulty if self.rank == rank else healthy
        return None if chosen is None else chosen(self)

    return method
