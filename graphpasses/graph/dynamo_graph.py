"""The graph that Dynamo traced: the live tensors that its inputs are, and what every call of the model checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses.errors import PipelineError
from graphpasses.graph.train_graph import GraphInput, InputKind, Stage, TrainGraph


@dataclass(repr=False, kw_only=True)
class DynamoGraph(TrainGraph):
    """A model's graph as Dynamo traced it, before autograd; its inputs are live tensors of the model or the batch.

    A pass may give every call of the compiled model further tensors, and have it check something first.
    """

    stage: Stage = Stage.DYNAMO
    # What each placeholder was given when the model was traced: the live tensor of the model or batch, or a
    # number.
    live: tuple[Any, ...]
    # What every call of the compiled model asks first, e.g. that tables still are where a pass put them; each
    # raises if not.
    checks: tuple[Callable[[], None], ...] = ()
    # Likewise, given what the call passes for each captured input.
    input_checks: tuple[Callable[[Sequence[Any]], None], ...] = ()
    # Called after each forward with gradients; what each returns is called when its backward begins, with the
    # gradients of the outputs, None for those that the loss does not depend on.
    backward_checks: tuple[Callable[[], Callable[[Sequence[torch.Tensor | None]], None]], ...] = ()

    @classmethod
    def of(cls, graph: TrainGraph) -> Self:
        """Returns the graph that a pass was given; raises if it is none that Dynamo traced."""
        if not isinstance(graph, cls):
            raise PipelineError(
                f"the pass rewrites what Dynamo traced, a {cls.__name__}; it was given a {type(graph).__name__} of "
                f"the stage {graph.stage.value}"
            )
        return graph

    def add_input(self, tensor: torch.Tensor, fqn: str) -> fx.Node:
        """Returns a placeholder that every call gives ``tensor``: the one added for it, or a new last one."""
        placeholders = self.placeholders
        for node, given in zip(placeholders, self.live, strict=True):
            if given is tensor and "grapharg" not in node.meta:  # which the batch or the model gives
                return node
        mode = fake_mode_of([node.meta.get("val") for node in placeholders])
        if mode is None:
            raise PipelineError(f"the graph has no tensor among its inputs; {fqn} cannot be added to them")
        fake = mode.from_tensor(tensor, static_shapes=True)
        return self.add_value(fqn, fake, tensor)

    def add_value(self, name: str, fake: torch.Tensor, live: torch.Tensor | None) -> fx.Node:
        """Returns a new last placeholder, which every call gives a live tensor, or what is made for it, if None."""
        node = self.add_placeholder(GraphInput(InputKind.VALUE, name), name, fake)
        node.meta["example_value"] = fake
        self.live += (live,)
        return node
