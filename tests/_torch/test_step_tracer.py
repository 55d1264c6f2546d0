"""Where a traced call is: the frames that torch itself keeps."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.step_tracer import frames_of_forward


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.inner(x)) + 1


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def lines(model: nn.Module) -> list[str | None]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x).cos()

    graph = make_fx(function, record_stack_traces=True)(torch.ones(2, 2)).graph
    return [node.meta.get("stack_trace") for node in graph.nodes]


def test_nodes_have_the_lines_that_torch_gives_them() -> None:
    model = Twice()
    expected = lines(model)
    with frames_of_forward():
        assert lines(model) == expected
    assert any("helper(self.inner(x)) + 1" in (line or "") for line in expected)
    assert None in expected  # as those of calls outside of forward
