"""Run a step on real tensors, twice, and keep all bits that it leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from experiments.mutants.running import copy_value
from graphpasses.graph import GraphInput, InputKind, OutputKind, TrainGraph

__all__ = ["FLAVOURS", "Bits", "run"]

FLAVOURS = ("normal", "special", "signs", "wide")
"""Kinds of random inputs: of size one; some NaN, infinite, subnormal or huge; zeros and ones; of all sizes."""

_SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, 6e4, 1e-7, 1.0)
_SIGNS = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-40)

Bits = tuple[object, object]
"""What a value is if all NaNs are one; and with their payloads."""


class _Run(fx.Interpreter):
    """Runs a graph on copies of the constants that it holds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._constants: dict[str, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        if target not in self._constants:
            self._constants[target] = copy_value(super().fetch_attr(target))
        return self._constants[target]


def run(graph: TrainGraph, flavour: str) -> Mapping[str, Bits]:
    """Runs a step of one rank; with normal inputs two, one after the other: a constant may have been written.

    Args:
        graph: a captured step.
        flavour: of its random inputs, which are the same in all graphs that have them.

    Returns:
        What each step leaves: outputs, inputs, written or not, and random numbers, by the names that proofs give; or
        an "error".
    """
    try:
        with torch.no_grad():
            return dict(_run(graph, flavour))
    except (RuntimeError, IndexError) as error:  # of a call on real tensors
        return {"error": (" ".join(str(error).split())[:150], None)}


def _run(graph: TrainGraph, flavour: str) -> Iterator[tuple[str, Bits]]:
    given: dict[str, Any] = {}
    step, update = _Run(graph.module), graph.update
    later = None if update is None or update.is_in_step else _Run(update.module)
    for number in range(2 if flavour == "normal" else 1):
        torch.default_generator.manual_seed(number)
        outputs = dict(_named(graph, step.run(*_values(graph, graph.inputs, graph.module, given, flavour))))
        if later is not None and update is not None:
            gradients = {
                f"gradient {fqn}": outputs.get(f"the gradient of {fqn!r}") for fqn in update.gradients
            }
            if None not in gradients.values():
                given |= gradients
                later.run(*_values(graph, update.inputs, update.module, given, flavour))
                given = {name: value for name, value in given.items() if name not in gradients}
        left = {**outputs, **given, "the state of random numbers after the step": torch.get_rng_state()}
        yield from ((f"step {number}, {name}", _bits(value)) for name, value in left.items())


def _values(
    graph: TrainGraph,
    inputs: Sequence[GraphInput],
    module: fx.GraphModule,
    given: dict[str, Any],
    flavour: str,
) -> Iterator[Any]:
    """Yields the values of inputs, and keeps them in ``given``."""
    for item, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True):
        fqn = graph.identity.canonical(item.fqn) if item.is_state else item.fqn
        name = f"{item.kind.value} {fqn}{f' {item.state}' if item.state else ''}"
        if name not in given:
            given[name] = _value(name, item, node.meta.get("val"), flavour)
        yield given[name]


def _value(name: str, item: GraphInput, fake: Any, flavour: str) -> Any:
    if item.kind is InputKind.LEARNING_RATE and not isinstance(fake, Tensor):
        return 0.01
    if not isinstance(fake, Tensor):
        return fake
    value = _random_value(name, tuple(fake.shape), fake.dtype, flavour)
    if item.state == "step":
        value = torch.full_like(value, 3.0)
    if item.state == "exp_avg_sq":
        value = value.abs()
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value)


@cache
def _random_value(name: str, shape: tuple[int, ...], dtype: torch.dtype, flavour: str) -> Tensor:
    rng = random.Random(f"{name} {flavour}")
    if not dtype.is_floating_point:
        return torch.tensor([rng.randrange(4) for _ in range(math.prod(shape))]).to(dtype).view(shape)
    values = [rng.gauss(0, 1) for _ in range(math.prod(shape))]
    if flavour == "special":
        values = [rng.choice(_SPECIAL) if rng.random() < 0.1 else value for value in values]
    elif flavour == "signs":
        values = [rng.choice(_SIGNS) for _ in values]
    elif flavour == "wide":
        values = [value * 10 ** rng.uniform(-12, 12) for value in values]
    return torch.tensor(values, dtype=torch.float64).to(dtype).view(shape)


def _named(graph: TrainGraph, outputs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    counts: dict[str, int] = {}
    for index, (item, value) in enumerate(zip(graph.outputs, outputs, strict=True)):
        name = "the loss" if item.is_loss else f"output {index}"
        if item.kind is OutputKind.GRADIENT:
            name = f"the gradient of {graph.identity.canonical(item.fqn)!r}"
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name} ({counts[name]})", value


def _bits(value: Any) -> Bits:
    if not isinstance(value, Tensor):
        return value, value
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    if not value.is_floating_point():
        return (value.dtype, value.shape, raw), raw
    one = flat.masked_fill_(flat.isnan(), float("nan")).view(torch.uint8).numpy().tobytes()
    return (value.dtype, value.shape, one), raw
