"""Every operator is made in one place."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.ops.define import define_operator


# From torch 2.15 on opcheck itself reads a gradient that is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_an_operator_with_a_backward() -> None:
    operator = define_operator(
        "test_scale(Tensor x, float by) -> Tensor",
        lambda x, by: by * x,
        fake=lambda x, by: torch.empty_like(x),
        backward=lambda ctx, gradient: (ctx.by * gradient, None),
        save=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    )
    assert operator is torch.ops.graphpasses.test_scale.default
    x = torch.ones(3, requires_grad=True)
    results = torch.library.opcheck(operator, (x, 3.0))
    assert set(results.values()) == {"SUCCESS"}
    operator(x, 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="test_scale"):
        define_operator("test_scale(Tensor x) -> Tensor", torch.clone, fake=torch.empty_like)


def test_a_composite_operator() -> None:
    operator = define_operator("test_twice_and_one(Tensor x) -> Tensor", lambda x: 2 * x + 1, fake=None)
    assert operator is torch.ops.graphpasses.test_twice_and_one.default
    x = torch.ones(3, requires_grad=True)
    operator(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    traced = make_fx(operator, tracing_mode="symbolic")(torch.ones(3))
    targets = [str(node.target) for node in traced.graph.find_nodes(op="call_function", target=operator)]
    assert targets == []
    assert operator(torch.ones(1)).item() == traced(torch.ones(3))[0].item() == 3
    with pytest.raises(RuntimeError, match="test_twice_and_one"):
        define_operator("test_twice_and_one(Tensor x) -> Tensor", torch.clone, fake=None)
