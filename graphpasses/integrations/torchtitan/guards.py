"""What a graph of graph_trainer's takes for granted: watched while it is traced, checked at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.graph import CapturedStep, TrainGraph
from graphpasses.graph.batch import VaryingDim, check_leaves
from graphpasses.state.reads import Reads
from graphpasses.state.snapshot import Snapshot

_ARGUMENTS = ("inputs", "labels", "global_valid_tokens", "extra_kwargs")  # of graph_trainer's traced function


def without_checks(graph: TrainGraph) -> TrainGraph:
    """Returns a copy of a graph without the checks of tensors, which torchtitan takes for dead code."""
    copy = graph.copy()
    for target in (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default):
        for node in copy.graph.find_nodes(op="call_function", target=target):
            copy.graph.erase_node(node)
    return copy


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
            watch = StageWatch(self._trainer.model_parts[0], self._trainer.loss_fn)
            with watch.watched():
                yield
            self.snapshot = watch.snapshot


def step_check(trainer: Any, step: CapturedStep) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Returns a hook that checks, before each call of graph_trainer's graph, what the graph has built in.

    Sizes of the batch are those of the graph's own inputs: a pass may have set what varied in the trace.
    """
    loss, model, snapshot = trainer.loss_fn, step.model, step.snapshot
    num_state = sum(item.is_state for item in step.inputs)
    inputs = step.placeholders[num_state:]
    leaves = [
        (_name(path), node.meta["val"] if isinstance(leaf, torch.Tensor) else leaf)
        for path, (_, leaf), node in zip(step.batch_structure.paths, step.batch_leaves, inputs, strict=True)
    ]
    varying = {
        path: {dim: VaryingDim() for dim, size in enumerate(leaf.shape) if isinstance(size, torch.SymInt)}
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }

    def check(gm: nn.Module, flat: tuple[Any, ...]) -> None:
        for name, now, traced in (
            ("loss_fn", trainer.loss_fn, loss),
            ("model_parts[0]", trainer.model_parts[0], model),
        ):
            if now is not traced:
                raise CaptureError(
                    f"the trainer's {name} was replaced since graph_trainer traced its step, which goes on with the "
                    "one before; put that back, or make a new trainer"
                )
        snapshot.check(model)
        check_leaves(flat[num_state:], leaves, varying)

    return check


def _name(path: str) -> str:
    """Names a leaf as the trainer does."""
    for index, argument in enumerate(_ARGUMENTS):
        path = path.replace(f"batch[{index}]", argument, 1)
    return path


class StageWatch:
    """What the trace of a model, or of a pipeline's stage, has built in."""

    def __init__(self, module: nn.Module, loss: Any) -> None:
        self._module, self._loss = module, loss
        self.snapshot: Snapshot | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what the trace inside reads."""
        reads = Reads(self._module, self._loss)
        with reads.watched(), reads.running():
            yield
            for slot in reads.changed():
                raise CaptureError(
                    f"forward reads attribute {slot.path!r} and changes it while graph_trainer traces it; the graph "
                    "would not. Keep it in a buffer that forward writes in place, or set it outside of forward"
                )
        if reads.drawn:
            raise CaptureError(f"loss_fn {reads.drawn}")
        self.snapshot = Snapshot.of(self._module, reads.attributes, reads.names)

    def check(self, module: nn.Module) -> None:
        """Raises if something is not what it was when the stage was traced."""
        assert self.snapshot is not None
        self.snapshot.check(module)

    def checks_inputs(self, values: Sequence[Any], stage: int) -> Callable[[list[Any]], None]:
        """Returns what checks a stage's flat inputs of a microbatch against those that it was traced with."""
        leaves = [(f"input {index} of stage {stage}", value) for index, value in enumerate(values)]

        def check(flat: list[Any]) -> None:
            plain = [each.detach() if isinstance(each, torch.Tensor) else each for each in flat]
            check_leaves(plain, leaves, {})

        return check
