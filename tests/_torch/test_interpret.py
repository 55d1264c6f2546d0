"""Graphs that are run node by node read numbers at once."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.interpret import make_cheap_to_run

aten = torch.ops.aten


def trace(function: object, *args: torch.Tensor) -> fx.GraphModule:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return make_fx(function, tracing_mode="symbolic")(*args)


def calls(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op.startswith("call")]


def sizes(splits: torch.Tensor) -> torch.Tensor:
    table = splits.view(2, -1).t()
    numbers = [table[i][j].item() for i in range(3) for j in range(2)]
    for number in numbers:
        aten._assert_scalar.default(number >= 0, "a size is negative")
    return torch.ones(sum(numbers)) * splits[-1].item()


def test_one_read_per_tensor() -> None:
    module = trace(sizes, torch.arange(6))
    splits = torch.tensor([3, 0, 2, 5, 1, 4])
    expected = module(splits)
    make_cheap_to_run(module)
    assert torch.equal(module(splits), expected)
    assert calls(module).count("tolist") == 2
    assert not {aten._local_scalar_dense.default, aten.select.int, aten._assert_scalar.default} & {
        *calls(module)
    }
    before = module.code
    make_cheap_to_run(module)
    assert module.code == before


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_is_a_number(shape: tuple[int, ...]) -> None:
    module = trace(lambda x: torch.ones(x.item() * 2), torch.full(shape, 3))
    make_cheap_to_run(module)
    assert module(torch.full(shape, 2)).tolist() == [1.0] * 4
    assert calls(module).count("tolist") == 1


def test_checks_stay() -> None:
    module = trace(sizes, torch.arange(6))
    make_cheap_to_run(module)
    with pytest.raises(RuntimeError, match="a size is negative"):
        module(torch.tensor([-3, 0, 2, 5, 1, 4]))


def test_a_tensor_that_is_written_later_is_read_where_it_was() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten._local_scalar_dense.default, (x,))
    graph.call_function(aten.add_.Scalar, (graph.call_function(aten.view.default, (x, [])), 1))
    second = graph.call_function(aten._local_scalar_dense.default, (x,))
    graph.output((first, second))
    module = fx.GraphModule({}, graph)
    make_cheap_to_run(module)
    assert module(torch.tensor(1)) == (1, 2)
