"""The axiom of operators on lists: each element is computed as if it were alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphpasses.analysis.effects import is_elementwise_on_lists
from tests.helpers.models import same_bits
from tests.proof.code import Code, Make, answer, capture_model

aten = torch.ops.aten
SHAPES = [(3, 5), (17,), (), (2, 1, 4), (0, 3)]


def random(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).to(dtype) + 0.1 for shape in SHAPES]


def steps() -> list[torch.Tensor]:
    return [torch.tensor(float(index + 1)) for index in range(len(SHAPES))]


FUSED = {"weight_decay": 0.1, "maximize": False}
ADAM = {**FUSED, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
SGD = {**FUSED, "lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}
Arguments = Callable[[torch.dtype], tuple[Any, ...]]
CASES: dict[str, tuple[Any, Arguments, dict[str, Any]]] = {
    "add": (aten._foreach_add_.List, lambda d: (random(d, 0), random(d, 1)), {"alpha": 0.3}),
    "mul": (aten._foreach_mul_.Scalar, lambda d: (random(d, 0), 0.7), {}),
    "lerp": (aten._foreach_lerp_.Scalar, lambda d: (random(d, 0), random(d, 1), 0.1), {}),
    "addcmul": (aten._foreach_addcmul_.Scalar, lambda d: (random(d, 0), random(d, 1), random(d, 2), 0.3), {}),
    "addcdiv": (
        aten._foreach_addcdiv_.ScalarList,
        lambda d: (random(d, 0), random(d, 1), random(d, 2), [0.1 * (i + 1) for i in range(len(SHAPES))]),
        {},
    ),
    "sqrt": (aten._foreach_sqrt.default, lambda d: (random(d, 0),), {}),
    "maximum": (aten._foreach_maximum_.List, lambda d: (random(d, 0), random(d, 1)), {}),
    "adamw": (aten._fused_adamw_.default, lambda d: (*(random(d, i) for i in range(4)), [], steps()), ADAM),
    "sgd": (aten._fused_sgd_.default, lambda d: tuple(random(d, i) for i in range(3)), SGD),
    "adagrad": (
        aten._fused_adagrad_.default,
        lambda d: (*(random(d, i) for i in range(3)), steps()),
        {**FUSED, "lr": 0.1, "lr_decay": 0.1, "eps": 1e-8},
    ),
}


# torch's fused SGD reads past the end of bf16 tensors on the CPU: called twice on the same, it gives other bits.
RUNS = [
    (name, dtype)
    for name in CASES
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    if (name, dtype) != ("sgd", torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_each_element_is_computed_alone(name: str, dtype: torch.dtype) -> None:
    operator, make, kwargs = CASES[name]
    assert is_elementwise_on_lists(operator)
    together, alone = make(dtype), make(dtype)
    results = operator(*together, **kwargs)
    for index in range(len(SHAPES)):
        one = [value[index : index + 1] if isinstance(value, list) else value for value in alone]
        result = operator(*one, **kwargs)
        if results is not None:
            assert same_bits(results[index], result[0])
    for ours, theirs in zip(together, alone, strict=True):
        if isinstance(ours, list) and ours and isinstance(ours[0], torch.Tensor):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_operator_on_one_tensor_is_none() -> None:
    assert not is_elementwise_on_lists(aten.add_.Tensor)
    assert not is_elementwise_on_lists(aten.stack.default)


@pytest.mark.parametrize(
    "operator",
    [
        aten._fused_rms_norm.default,  # on one tensor
        aten._fused_dropout.default,
        aten._foreach_addcmul_.Tensor,  # each has its number of one tensor
        aten._fused_adamw.default,  # returns a list of each argument
    ],
    ids=str,
)
def test_what_is_called_alike_and_is_another(operator: Any) -> None:
    assert not is_elementwise_on_lists(operator)


@pytest.mark.parametrize(
    ("device", "dtype", "is_right"),
    [("cpu", torch.float64, True), ("meta", torch.float32, True), ("meta", torch.float64, False)],
)
def test_an_accelerator_has_other_kernels_for_lists_of_two_dtypes(
    device: str, dtype: torch.dtype, is_right: bool
) -> None:
    """Then a norm is that of a tensor alone, which is added up in another order."""

    def norms(are_together: bool) -> Make:
        def make(code: Code) -> fx.Node:
            one = code._to_copy_default(code.x, device=torch.device(device))
            two = code._to_copy_default(one, dtype=dtype)
            lists = [[one, two]] if are_together else [[one], [two]]
            first, *_ = [code.call(aten._foreach_norm.Scalar, each, 2) for each in lists]
            return code.item(first, 0)

        return make

    captured = capture_model()
    assert answer(captured, norms(True), norms(True)) == "proved"
    assert (answer(captured, norms(True), norms(False)) == "proved") == is_right
