"""What a graph of graph_trainer's takes for granted: watched while it is traced, checked at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn

from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.graph import CapturedStep
from graphpasses.graph.batch import VaryingDim, check_leaves
from graphpasses.state.reads import Reads
from graphpasses.state.snapshot import Snapshot

_ARGUMENTS = ("inputs", "labels", "global_valid_tokens", "extra_kwargs")  # of graph_trainer's traced function


class TraceWatch:
    """Replaces a trainer's ``train_context``, in which graph_trainer first traces and then runs its step."""

    def __init__(self, trainer: Any) -> None:
        self.snapshot: Snapshot | None = None  # what the step was found to have built in while it was traced
        self._trainer = trainer
        self._context: Callable[[], AbstractContextManager[None]] = trainer.train_context
        trainer.train_context = self

    @classmethod
    def of(cls, trainer: Any) -> TraceWatch:
        """Returns the watch of a trainer that graph_trainer's hook made; raises if it was replaced."""
        watch = trainer.train_context
        if not isinstance(watch, cls):
            raise UnsupportedError(
                f"{type(trainer).__name__}.train_context was replaced after the trainer was made, and nobody saw "
                "what the step reads while it was traced; set it before GraphTrainer.__init__ ends, or leave it"
            )
        return watch

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._context():
            if self.snapshot is not None:
                yield
                return
            model = self._trainer.model_parts[0]
            reads = Reads(model, self._trainer.loss_fn)
            with reads.watched(), reads.running():
                yield
                for slot in reads.changed():
                    raise CaptureError(
                        f"forward reads attribute {slot.path!r} and changes it while graph_trainer traces it; the "
                        "graph would not. Keep it in a buffer that forward writes in place, or set it outside of "
                        "forward"
                    )
            self.snapshot = Snapshot.of(model, reads.attributes, reads.names)


class StepGuards:
    """Checks, at each call of graph_trainer's graph, what the graph has built in."""

    def __init__(self, trainer: Any, step: CapturedStep) -> None:
        self._trainer, self._loss = trainer, trainer.loss_fn
        self._model, self._snapshot = step.model, step.snapshot
        self._num_state = sum(item.is_state for item in step.inputs)
        self._leaves = [
            (_name(path), leaf)
            for path, (_, leaf) in zip(step.batch_structure.paths, step.batch_leaves, strict=True)
        ]
        self._varying = {
            path: {dim: VaryingDim() for dim, size in enumerate(leaf.shape) if isinstance(size, torch.SymInt)}
            for path, leaf in self._leaves
            if isinstance(leaf, torch.Tensor)
        }

    def watch(self, gm: fx.GraphModule) -> None:
        """Lets a graph check each of its calls."""
        gm.register_forward_pre_hook(self._check)

    def _check(self, gm: nn.Module, flat: tuple[Any, ...]) -> None:
        """Checks a call."""
        for name, now, traced in (
            ("loss_fn", self._trainer.loss_fn, self._loss),
            ("model_parts[0]", self._trainer.model_parts[0], self._model),
        ):
            if now is not traced:
                raise CaptureError(
                    f"the trainer's {name} was replaced since graph_trainer traced its step, which goes on with the "
                    "one before; put that back, or make a new trainer"
                )
        self._snapshot.check(self._model)
        check_leaves(flat[self._num_state :], self._leaves, self._varying)


def _name(path: str) -> str:
    """Names a leaf as the trainer does."""
    for index, argument in enumerate(_ARGUMENTS):
        path = path.replace(f"batch[{index}]", argument, 1)
    return path
