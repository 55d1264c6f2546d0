"""What the quick way computes is what the mode computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphpasses._torch import fake_calls
from graphpasses._torch.fake_calls import fake_call
from graphpasses._torch.fake_process_group import fake_process_group

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
CASES: dict[Any, list[tuple[Any, ...]]] = {
    aten._chunk_cat.default: [([(6, 2), (5,)], 0, 2)],
    aten._to_copy.default: [((6, 2), {"dtype": torch.bfloat16})],
    aten.cat.default: [([(6,), (2,)],), ([(6, 2), (6, 3)], 1)],
    aten.div.Scalar: [((6, 2), 2.0)],
    aten.logical_not.default: [((6, 2),)],
    aten.reshape.default: [((6, 2), [-1]), ((6, 2), [3, 4])],
    aten.split_with_sizes.default: [((6, 2), [1, 5])],
    aten.split_with_sizes_copy.default: [((6, 2), [2, 4]), ((6, 4), [1, 3], 1)],
    aten.view.default: [((6, 2), [-1]), ((6, 2), [2, 6])],
    aten.view.dtype: [((6, 2), torch.uint8)],
    collectives.all_gather_into_tensor.default: [((6, 2), 4, "0")],
    collectives.all_reduce.default: [((6, 2), "avg", "0")],
    collectives.reduce_scatter_tensor.default: [((8, 2), "sum", 4, "0")],
    collectives.wait_tensor.default: [((6, 2),)],
}
# Of each tensor the shape, and numbers; of several the first may be written in place.
ELEMENTWISE: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [((6, 2), (2,), {"alpha": 2}), ((6, 2), 0.5)],
    aten.addcdiv.default: [((6, 2), (6, 2), (2,), {"value": -0.1})],
    aten.addcmul.default: [((6, 2), (6, 1), (6, 2), {"value": 0.1})],
    aten.div.Tensor: [((6, 2), ()), ((6, 2), 2)],
    aten.lerp.Scalar: [((6, 2), (6, 2), 0.1)],
    aten.mul.Tensor: [((6, 2), (6, 2)), ((6, 2), 2.0)],
    aten.neg.default: [((6, 2),)],
    aten.sqrt.default: [((6, 2),)],
    aten.sub.Tensor: [((6, 2), (6, 1), {"alpha": 2})],
}


def facts(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return [facts(part) for part in value]
    assert isinstance(value, FakeTensor)
    stored = value.untyped_storage().nbytes()
    return (
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.device,
        stored,
        value.requires_grad,
    )


def storages(*values: Any) -> list[int]:
    """Returns a number for the memory of each tensor, in the order in which they are met."""
    numbers: dict[int, int] = {}
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [numbers.setdefault(each.untyped_storage()._cdata, len(numbers)) for each in flat]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("target", CASES, ids=str)
def test_same_as_the_mode(target: Any, transposed: bool) -> None:
    with fake_process_group(4):
        for shapes, *args in CASES[target]:
            mode = FakeTensorMode()
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}

            def make(shape: tuple[int, ...], mode: FakeTensorMode = mode) -> Tensor:
                with mode:
                    tensor = torch.empty(shape[::-1], dtype=torch.float32)
                return tensor.t() if transposed else tensor.t().contiguous()

            given = [make(shape) for shape in shapes] if isinstance(shapes, list) else make(shapes)
            try:
                with mode:
                    expected = target(given, *args, **kwargs)
            except (RuntimeError, ValueError):  # a view of what is not contiguous
                assert transposed
                with pytest.raises((RuntimeError, ValueError)):
                    fake_call(mode, target, (given, *args), kwargs)
                continue
            for found in (fake_call(mode, target, (given, *args), kwargs) for _ in range(2)):
                assert facts(found) == facts(expected)
                assert storages(given, found) == storages(given, expected)


_OF_ONE_DTYPE = {aten.lerp.Scalar, aten.lerp_.Scalar}


def in_place(target: Any) -> Any:
    _, name, overload = str(target).split(".")
    return getattr(getattr(aten, f"{name}_", None), overload, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("target", ELEMENTWISE, ids=str)
def test_same_as_the_mode_and_the_kernel(target: Any, is_transposed: bool, dtype: torch.dtype) -> None:
    """On tensors of two orders of dims, and of two dtypes; a tensor that is written keeps its memory."""
    for case in ELEMENTWISE[target]:
        kwargs, mode = case[-1] if isinstance(case[-1], dict) else {}, FakeTensorMode()
        reals = [each for each in case if not isinstance(each, dict)]
        for index, shape in enumerate(reals):
            if isinstance(shape, tuple):
                made = torch.ones(shape, dtype=dtype if index == 0 else torch.float32)
                reals[index] = made.t().contiguous().t() if is_transposed == (index == 0) and shape else made
        for each in (target, in_place(target)):
            if each in fake_calls._BY_META_KERNEL | fake_calls._IN_PLACE:
                fakes, others = (
                    [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in reals]
                    for _ in range(2)
                )
                if each in _OF_ONE_DTYPE and dtype is not torch.float32:
                    with pytest.raises(RuntimeError, match="expected dtype"):
                        fake_call(mode, each, tuple(fakes), kwargs)
                    continue
                with mode:
                    expected = each(*others, **kwargs)
                found = fake_call(mode, each, tuple(fakes), kwargs)
                real = each(*reals, **kwargs)
                assert facts(found) == facts(expected)
                assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
                assert storages(*fakes_in(fakes), found) == storages(*fakes_in(others), expected)


def fakes_in(values: list[Any]) -> list[Any]:
    return [each for each in values if isinstance(each, Tensor)]


def test_each_quick_way_is_compared() -> None:
    both = {*CASES, *ELEMENTWISE}
    assert both == fake_calls._BY_META_KERNEL
    assert {in_place(each) for each in ELEMENTWISE} >= fake_calls._IN_PLACE


@pytest.mark.parametrize("conjugate", [False, True])
def test_each_call_has_a_memory_of_its_own(conjugate: bool) -> None:
    mode = FakeTensorMode()
    with mode:
        tensor = torch.empty(6, 2, dtype=torch.complex64)
        tensor = tensor.conj() if conjugate else tensor  # to the mode
    first, second = (fake_call(mode, aten.div.Scalar, (tensor, 2.0), {}) for _ in range(2))
    assert storages(tensor, [first, second]) == [0, 1, 2]
    assert [each.is_conj() for each in (first, second)] == [False, False]


@pytest.mark.parametrize("target", [aten.view.default, aten.reshape.default])
def test_what_requires_a_gradient_is_recorded(target: Any) -> None:
    mode = FakeTensorMode()
    with mode:
        tensor = torch.empty(6, 2, requires_grad=True)
    for _ in range(2):
        made = fake_call(mode, target, (tensor, [-1]), {})
        assert (made.requires_grad, made.is_leaf) == (True, False)


def test_it_is_made_as_the_constructor_makes_it() -> None:
    mode = FakeTensorMode()
    from_real = mode.from_tensor(torch.nn.Parameter(torch.ones(6, 2)))
    with mode:
        plain, expected = torch.empty(6, 2), torch.empty(12)
    from_real = from_real.detach()
    for tensor in (from_real, plain):
        made = fake_call(mode, aten.view.default, (tensor, [-1]), {})
        assert made.__dict__ == expected.__dict__
        assert torch._C._dispatch_keys(made).raw_repr() == torch._C._dispatch_keys(expected).raw_repr()
        assert (made.requires_grad, made.is_leaf, made._is_view()) == (False, True, False)


@pytest.mark.parametrize("number", [2, 2.0, True])
def test_numbers_of_other_types_are_other_arguments(number: float) -> None:
    mode = FakeTensorMode()
    with mode:
        tensor = torch.empty(6, 2)
        expected = aten.div.Scalar(tensor, number)
    assert facts(fake_call(mode, aten.div.Scalar, (tensor, number), {})) == facts(expected)


def test_symbolic_sizes_go_to_the_mode() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    tensor = mode.from_tensor(torch.ones(6, 2))
    size = tensor.shape[0]
    assert isinstance(size, torch.SymInt)
    assert fake_call(mode, aten.view.default, (tensor, [size * 2]), {}).shape == (size * 2,)
