"""What constants hold is read as data, so that what is written to them shows."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.graph import nodes
from graphpasses.graph.nodes import constant_bits, read_constants
from graphpasses.identity import same_bits
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline


class Module(nn.Module):
    def __init__(self, constant: torch.Tensor) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_write_shows(dtype: torch.dtype) -> None:
    graph = fx.symbolic_trace(Module(constant := torch.zeros(3, 2, dtype=dtype).t())).graph
    before = read_constants(graph)
    assert read_constants(graph) == before
    constant[1, 1] = True
    assert read_constants(graph) != before


def test_a_write_to_a_large_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_MAX_BYTES", 16)
    large = torch.zeros(8)
    before = constant_bits(large)
    assert constant_bits(large) == before
    large[:2].add_(1)
    assert constant_bits(large) != before
    with torch.inference_mode():
        assert constant_bits(torch.zeros(8)) != before


def test_bits_count() -> None:
    zero = torch.zeros(2)
    assert constant_bits(zero) == constant_bits(torch.zeros(2))
    assert constant_bits(zero) != constant_bits(-zero)
    assert constant_bits(zero) != constant_bits(zero.int())
    assert constant_bits(zero.expand(2, 2)) != constant_bits(torch.zeros(2, 2))  # strides


def test_a_graph_is_its_calls_and_constants() -> None:
    one, two, other = (fx.symbolic_trace(Module(torch.full((1,), number))) for number in (1.0, 1.0, 2.0))
    assert constant_bits(one) == constant_bits(two)
    assert constant_bits(one) != constant_bits(other)


def test_a_graph_is_its_calls_of_now() -> None:
    """A pass need not recompile what it rewrites, and what compiles it later reads its nodes."""
    one = fx.symbolic_trace(Module(torch.ones(1)))
    before = constant_bits(one)
    (call,) = one.graph.find_nodes(op="call_function", target=operator.add)
    call.target = operator.sub
    assert constant_bits(one) != before


def test_a_sparse_constant_passes_the_checks_between_passes() -> None:
    """The tracer gives it no fake value."""
    adjacency, x = torch.tensor([[0.0, 2.0], [1.0, 0.0]]).to_sparse(), torch.randn(2, 3)
    model = nn.Linear(3, 1)

    def loss_fn(model: nn.Module, x: torch.Tensor, graph: torch.Tensor = adjacency) -> torch.Tensor:
        return torch.sparse.mm(graph, model(x)).square().mean()

    step = Pipeline((DeduplicateShared(),)).run(capture_train_step(loss_fn, model, x))
    loss, grad = step(x), model.weight.grad
    model.zero_grad()
    expected = loss_fn(model, x)
    expected.backward()  # type: ignore[no-untyped-call]
    assert same_bits(loss, expected.detach())
    assert torch.equal(grad, model.weight.grad)  # type: ignore[arg-type]
    assert not same_bits(loss, loss_fn(model, x, 2 * adjacency).detach())
