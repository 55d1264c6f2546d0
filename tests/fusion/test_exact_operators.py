"""Each exact operator has eager's bits on all values of half precision, and on random bits of float32 and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpasses._torch.exact_kernels import compile_exactly
from graphpasses.fusion.adversarial import find_difference, num_different
from graphpasses.fusion.exact_operators import COMPARISONS, LOW, exact_on, run_exactly

aten = torch.ops.aten
NUMBERS = (0.1, 3.0, -0.0, 512)
POWERS = (1, 2, 3)

Call = Callable[[Any, Any, Any], Any]


def calls(call: Call, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """Calls each operator, those on two tensors on both, those on a number on several."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    results = []
    for target, known in exact_on(x.device).items():
        numbers = POWERS if target is aten.pow.Tensor_Scalar else NUMBERS if "Scalar" in str(target) else (y,)
        for number in numbers:
            arguments = {"self": node, "alpha": 1, "exponent": number}
            if known.is_exact(arguments):
                is_unary = len(target._schema.arguments) == 1
                results.append(call(target, (x,) if is_unary else (x, number), {}))
    for target in sorted(COMPARISONS, key=str):
        numbers = (*NUMBERS, 1) if "Scalar" in str(target) else (y,)
        results += [call(target, (x, number), {}) for number in numbers]
    others = {torch.float64: {torch.float32}, torch.float32: LOW}.get(x.dtype, {x.dtype, torch.float32})
    results += [call(aten._to_copy.default, (x,), {"dtype": dtype}) for dtype in sorted(others, key=str)]
    return results


def eagerly(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_operators_have_eagers_bits(dtype: torch.dtype, device: str) -> None:
    if dtype.itemsize == 2:  # in each place of a vector, and in its tail
        x = torch.arange(2**16 + 5, device=device).to(torch.int16).view(dtype)
        y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)]
    else:
        x, y = torch.empty(2, 1003, dtype=dtype, device=device).unbind()
    kernel = compile_exactly(lambda x, y: calls(run_exactly, x, y), [x, y])
    if dtype.itemsize == 2:
        names = calls(lambda target, args, kwargs: f"{target} {args[1:]}", x, y)
        found = zip(names, kernel([x, y]), calls(eagerly, x, y), strict=True)
        assert {name: num for name, a, b in found if (num := num_different(a, b))} == {}
    assert find_difference(kernel, lambda x, y: calls(eagerly, x, y), [x, y]) == ""


def test_a_cast_left_out_is_found() -> None:
    x = torch.empty(1003, dtype=torch.bfloat16)

    def unrounded(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [((inputs[0].float() * inputs[1].float()) + inputs[1].float()).bfloat16()]

    assert find_difference(unrounded, lambda x, y: [x * y + y], [x, x]).startswith("result 0 has")


def test_results_in_one_memory_are_found() -> None:
    def twice(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] + 1] * 2

    found = find_difference(twice, lambda x: [x + 1, x + 1], [torch.empty(5)])
    assert found == "results share memory"
    assert find_difference(lambda inputs: inputs, lambda x: [x.clone()], [torch.empty(5)]) == found
