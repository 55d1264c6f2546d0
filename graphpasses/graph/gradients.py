"""What a captured step does with the gradients that its graph computes: what autograd and its hooks would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphpasses._torch.fsdp2_accumulation import Accumulators
from graphpasses._torch.module_hooks import accumulation_hooks
from graphpasses.graph.accumulation import accumulate_gradient, as_gradient, shared_values
from graphpasses.graph.kinds import OutputKind
from graphpasses.graph.train_graph import TrainGraph


class Gradients:
    """Where the gradients of a step go: to parameters, or to where FSDP2 keeps those that wait.

    ``slots`` are those of parameters, by FQN. If hooks wait behind the accumulation, ``hook_order`` has the FQNs in
    the order in which eager fills gradients; else it is ().
    """

    def __init__(self, step: TrainGraph, slots: Mapping[str, int], hook_order: Sequence[str]) -> None:
        fqn, sources = step.identity.canonical, defaultdict(list)
        for name, node in step.parameter_placeholders():
            sources[name].append(node)
        of_outputs = {i: sources[fqn(item.fqn)] for i, item in enumerate(step.outputs) if item.is_gradient}
        shared = shared_values(step.output_values, of_outputs)
        places = {fqn(name): i for i, name in enumerate(hook_order)}
        given = [
            (index, item)
            for index, item in enumerate(step.outputs)
            if item.is_gradient or item.kind is OutputKind.VALUE
        ]
        given.sort(key=lambda pair: places.get(fqn(pair[1].fqn), -1) if pair[1].is_gradient else -1)
        # Of each its position, its parameter (a slot; a place if it waits), and if its memory is shared.
        self._slots = tuple(
            (index, slots[fqn(item.fqn)] if item.is_gradient else item.fqn, index in shared) for index, item in given
        )
        self._calls_hooks = bool(hook_order)

    def leave(self, flat: Sequence[Any], tensors: Sequence[torch.Tensor | None], accumulators: Accumulators) -> None:
        """Gives a model's ``tensors``, by slot, the gradients that are among what a graph returned."""
        for index, place, is_shared in self._slots:
            gradient = flat[index]
            if isinstance(place, str):
                accumulators.keep(place, gradient, partial(as_gradient, is_shared=is_shared))
            elif gradient is not None and (parameter := tensors[place]) is not None:
                accumulate_gradient(parameter, gradient, is_shared=is_shared)
                for hooks, number in accumulation_hooks(parameter) if self._calls_hooks else ():
                    hooks[number](parameter)
