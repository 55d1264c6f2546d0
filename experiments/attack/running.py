"""Run a step on real tensors, and keep all bits that it leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from experiments.mutants.running import copy_value
from graphpasses.graph import GraphInput, InputKind, OutputKind, TrainGraph, find_collectives
from graphpasses.simulate import Topology, run_cluster

FLAVOURS = ("normal", "special", "signs", "wide")
"""Kinds of random inputs: of size one; some NaN, infinite, subnormal or huge; zeros and ones; of all sizes."""

_SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, 6e4, 1e-7, 1.0)
_SIGNS = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-40)

Bits = Mapping[tuple[str, str], tuple[object, object]]
"""By the name that proofs give a value, and by what ran: the value if all NaNs are one; and with their payloads."""


def error_of(bits: Bits) -> str:
    """Returns what ended a run; empty if nothing did.

    Args:
        bits: what it left.
    """
    return next((text for name, text in bits if name == "error"), "")


class _Run(fx.Interpreter):
    """Runs a graph on copies of the constants that it holds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._constants: dict[str, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        if target not in self._constants:
            self._constants[target] = copy_value(super().fetch_attr(target))
        return self._constants[target]


def num_ranks_of(graph: TrainGraph) -> int:
    """Returns on how many ranks a step runs: two if it has collectives.

    Args:
        graph: as it was captured; a rewritten one may have lost them.
    """
    return 2 if find_collectives(graph.graph) else 1


def run(graph: TrainGraph, flavour: str, num_ranks: int) -> Bits:
    """Runs a step; with normal inputs twice: a constant may have been written.

    Args:
        graph: a captured step.
        flavour: of its random inputs, which are the same in all graphs that have them.
        num_ranks: on which it runs; what is compared with a step runs on as many.

    Returns:
        What each step leaves: outputs, inputs, written or not, and random numbers; or nothing but an "error".
    """
    try:
        if num_ranks == 1:
            return dict(_run(graph, flavour, 0))
        topology = Topology(num_ranks, gpus_per_node=num_ranks)
        ranks = run_cluster(lambda: dict(_run(graph, flavour, dist.get_rank())), topology)
        return {key: value for rank in ranks for key, value in rank.items()}
    except (RuntimeError, IndexError, ArithmeticError) as error:  # of a call on real tensors and sizes
        return {("error", " ".join(str(error).split())[:150]): (None, None)}


def _run(graph: TrainGraph, flavour: str, rank: int) -> Iterator[tuple[tuple[str, str], tuple[object, object]]]:
    given: dict[str, Any] = {}
    step, update = _Run(graph.module), graph.update
    later = None if update is None or update.is_in_step else _Run(update.module)

    def values(inputs: Sequence[GraphInput], module: fx.GraphModule) -> Iterator[Any]:
        for item, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True):
            fqn = graph.identity.canonical(item.fqn) if item.is_state else item.fqn
            name = f"{item.kind.value} {fqn}{f' {item.state}' if item.state else ''}"
            if name not in given and item.kind is InputKind.HYPERPARAMETER and update is not None:
                (given[name],) = update.values([item], {})
            if name not in given:
                given[name] = _value(f"{name} {rank}", item, node.meta.get("val"), flavour)
            yield given[name]

    for number in range(2 if flavour == "normal" else 1):
        torch.manual_seed(number)
        with torch.no_grad():
            outputs = dict(_named(graph, step.run(*values(graph.inputs, graph.module))))
            if later is not None and update is not None:
                named = {fqn: outputs.get(f"the gradient of {fqn!r}") for fqn in update.gradients}
                if None not in named.values():
                    given |= {f"gradient {fqn}": gradient for fqn, gradient in named.items()}
                    later.run(*values(update.inputs, update.module))
                    given = {name: given[name] for name in given if not name.startswith("gradient ")}
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        drawn = torch.cat([torch.get_rng_state(), *on_gpus])
        left = {**outputs, **given, "the state of random numbers after the step": drawn}
        for name, value in left.items():
            yield (name, f"step {number} of rank {rank}, {flavour} inputs"), _bits(value)


def _value(name: str, item: GraphInput, fake: Any, flavour: str) -> Any:
    if not isinstance(fake, Tensor):
        return _size(fake)
    shape, strides = (tuple(map(_size, each)) for each in (fake.shape, fake.stride()))
    value = _random_value(name, shape, fake.dtype, flavour)
    if item.state == "step":
        value = torch.full_like(value, 3.0)
    if item.state == "exp_avg_sq":
        value = value.abs()
    return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device).copy_(value)


def _size(size: Any) -> Any:
    """Returns what a size was when the step was captured."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


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


def _bits(value: Any) -> tuple[object, object]:
    if not isinstance(value, Tensor):
        return value, value
    flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    if not value.is_floating_point():
        return (value.dtype, value.shape, raw), raw
    one = flat.masked_fill_(flat.isnan(), float("nan")).view(torch.uint8).numpy().tobytes()
    return (value.dtype, value.shape, one), raw
