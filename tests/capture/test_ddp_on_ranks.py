"""DistributedDataParallel around, inside and in a part of what is compiled: three ranks add as in eager."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn import parallel

from graphpasses.capture.torch_compile import graphpasses as _backend  # noqa: F401  # imported before the ranks fork
from graphpasses.errors import UnsupportedError
from graphpasses.parity.launch import run_ranks
from tests.helpers.models import same_bits

DDP = parallel.DistributedDataParallel
Make = Callable[[nn.Sequential, Callable[[Any], Any]], Callable[..., Any]]


class Whole(nn.Module):
    """Calls a model; torch.compile would compile each module of an ``nn.Sequential`` with hooks for itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def in_a_closure(model: nn.Module, compiled: Callable[[Any], Any]) -> Callable[..., Any]:
    ddp = DDP(model)
    return compiled(lambda x: ddp(x))  # type: ignore[no-any-return]


def put_in_later(model: nn.Module, compiled: Callable[[Any], Any]) -> Callable[..., Any]:
    whole = Whole(model)
    call = compiled(whole)
    whole.model = DDP(model)
    return call  # type: ignore[no-any-return]


# What eager is, and how it is compiled.
CASES: dict[str, tuple[Callable[[nn.Module], Callable[..., Any]], Make]] = {
    "inside": (DDP, lambda model, compiled: compiled(DDP(model))),
    "around": (DDP, lambda model, compiled: DDP(compiled(model))),
    "around a part": (DDP, lambda model, compiled: DDP(nn.Sequential(compiled(model[:3]), model[3:]))),
    "in a closure": (DDP, in_a_closure),
    "put in later": (lambda model: Whole(DDP(model)), put_in_later),
    "static": (
        lambda model: DDP(model, static_graph=True),
        lambda model, compiled: compiled(DDP(model, static_graph=True)),
    ),
    "replicated": (
        lambda model: replicate(Whole(model)),
        lambda model, compiled: compiled(replicate(Whole(model))),
    ),
}

# With torch's own backend the order of buckets is that of a graph.
CONTROLS = ("around", "around a part", "replicated")


def train(make: Callable[[Any], Callable[..., Any]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (37, 53, 41, 7)
    layers = [[nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*(each for layer in layers for each in layer))
    call = make(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        call(torch.randn(11, 37, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def compare() -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name, (eager, make) in CASES.items():
        expected = train(eager)
        for backend, options in (("graphpasses", {"inner": "aot_eager"}), ("aot_eager", None)):
            if backend == "aot_eager" and name not in CONTROLS:
                continue
            torch._dynamo.reset()
            compiled = lambda each: torch.compile(each, backend=backend, options=options)  # noqa: B023, E731
            weights = train(lambda model: make(model, compiled))  # noqa: B023
            found[f"{name}, {backend}"] = all(map(same_bits, weights, expected))
    # At these Dynamo would cut the graph; torch's own backend raises.
    in_buckets = functools.partial(DDP, bucket_cap_mb=0.01)
    compiled = functools.partial(torch.compile, backend="graphpasses", options={"inner": "aot_eager"})
    weights = train(lambda model: in_buckets(compiled(model)))
    found["in small buckets, graphpasses"] = all(map(same_bits, weights, train(in_buckets)))
    whole = Whole(nn.Linear(4, 4))
    call = compiled(whole)
    with torch.no_grad():
        call(torch.ones(2, 4))
    whole.model = DDP(whole.model)
    try:
        call(torch.ones(2, 4))
    except UnsupportedError as error:
        found["refused after the first call, graphpasses"] = "after the first call" in str(error).replace(
            "its", "the"
        )
    return found


@pytest.mark.multiprocess
def test_three_ranks() -> None:
    found = run_ranks(compare, 3)
    assert all(each == found[0] for each in found)
    assert all(is_equal for name, is_equal in found[0].items() if "graphpasses" in name), found[0]
    assert "refused after the first call, graphpasses" in found[0]
    for name in CONTROLS:
        assert not found[0][f"{name}, aot_eager"]
