"""Every operator is made in one place."""

from __future__ import annotations

import pytest
import torch

from graphpasses.ops.define import define_operator


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
    results = torch.library.opcheck(operator, (x, 3.0))  # type: ignore[arg-type]
    assert set(results.values()) == {"SUCCESS"}
    operator(x, 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="test_scale"):
        define_operator("test_scale(Tensor x) -> Tensor", torch.clone, fake=torch.empty_like)
