"""A compiled module is one call to a tracer, and computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import graphpasses
from graphpasses._torch.compile_backend import Backend
from graphpasses.errors import UnsupportedError


def compiled(**options: object) -> nn.Module:
    backend = Backend(lambda graph, inputs: graph.forward, lambda root, compiled, _: compiled, **options)
    module: nn.Module = torch.compile(nn.Linear(4, 2), backend=backend)
    return module


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 1).relu()


def test_one_call_to_a_tracer() -> None:
    inner, x = compiled(), torch.ones(3, 4)
    for module in (inner, Outer(inner)):
        graph = fx.Tracer().trace(module)
        names = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
        assert names == (["call"] if module is inner else ["add", "call"])
        assert not graph.find_nodes(op="call_module", target="inner")
    traced = fx.GraphModule(Outer(inner), graph)
    assert torch.equal(traced(x), Outer(inner)(x))
    assert not torch.equal(traced(x), inner(x))


def test_the_backend_may_refuse() -> None:
    def refuse() -> None:
        raise UnsupportedError("not so")

    module = compiled(when_recorded=refuse)
    with pytest.raises(UnsupportedError, match="not so"):
        fx.Tracer().trace(module)
    assert module(torch.ones(3, 4)).shape == (3, 2)


def test_what_is_compiled_is_not_compiled_again() -> None:
    module = graphpasses.compile(nn.Linear(4, 2))
    with pytest.raises(UnsupportedError) as caught:
        module.compile(fullgraph=True)
    assert str(caught.value) == (
        "Linear is compiled already, for the backend 'graphpasses': what compiles its model by itself, as "
        "TrainPipelinePT2 does, takes the uncompiled one, and TorchCompileConfig(backend='graphpasses')"
    )
