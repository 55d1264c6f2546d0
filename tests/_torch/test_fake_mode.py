"""In a step that is traced, fake results have the strides of the operators' kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheKey

from graphpasses._torch import fake_calls, fake_mode
from graphpasses._torch.fake_mode import strides_of_kernels
from graphpasses._torch.tested_versions import RELEASE

aten = torch.ops.aten

NUMBERS: dict[Any, tuple[Any, ...]] = {
    aten._log_softmax_backward_data.default: (-1, torch.float32),
    aten.elu_backward.default: (1.0, 1.0, 1.0, False),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.huber_loss_backward.default: (0, 1.0),
    aten.logit_backward.default: (None,),
    aten.mse_loss_backward.default: (0,),
    aten.native_batch_norm.default: (None, None, None, None, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: (
        *(None, None, None, torch.zeros(3), torch.ones(3), True, 1e-5),
        [True, False, False],
    ),
    aten.native_layer_norm_backward.default: ([4], None, None, [True, False, False]),
    aten.smooth_l1_loss_backward.default: (0, 1.0),
    aten.softplus_backward.default: (1.0, 20.0),
}


def view_strides(sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> list[Any]:
    """Returns the strides of a view in eager and in a fake mode; None where there is no such view."""
    mode, found = FakeTensorMode(), []
    for make in (lambda: torch.empty(sizes), lambda: mode.from_tensor(torch.empty(sizes))):
        with nullcontext() if not found else mode:
            try:
                found.append(make().permute(order).view(shape).stride())
            except (RuntimeError, ValueError):
                found.append(None)
    return found


def test_views_have_the_strides_of_kernels() -> None:
    """Those of torch's fakes differ where a dimension has one element: the control."""
    cases = [
        (sizes, order, shape)
        for sizes in ((1, 2, 3), (1, 6, 1), (2, 1, 4))
        for order in itertools.permutations(range(3))
        for shape in itertools.product((1, 2, 3, 4, 6, 8), repeat=3)
        if math.prod(shape) == math.prod(sizes)
    ]
    assert any(theirs != ours for theirs, ours in itertools.starmap(view_strides, cases))
    with strides_of_kernels():
        for case in cases:
            theirs, ours = view_strides(*case)
            assert theirs == ours, case


def test_sums_of_contiguous_tensors_are_contiguous() -> None:
    """As the kernel's where a dimension has one element; torch's fakes are in channels last: the control."""
    strides = []
    x = torch.empty_strided((2, 3, 1, 1), (3, 1, 3, 3))
    for scope in (nullcontext, strides_of_kernels):
        with FakeTensorMode() as mode, scope():
            fake = mode.from_tensor(x)
            strides.append((fake + fake).stride())
    assert strides == [(3, 1, 3, 3), (3, 1, 1, 1)]
    assert (x + x).stride() == (3, 1, 1, 1)


def test_rrelu_is_contiguous() -> None:
    strides = []
    x = torch.ones(3, 2).T
    for scope in (nullcontext, strides_of_kernels):
        with FakeTensorMode() as mode, scope():
            strides.append(torch.rrelu(mode.from_tensor(x), training=True).stride())
    assert strides == [(1, 2), (3, 1)]
    assert torch.rrelu(x, training=True).stride() == (3, 1)


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (0.5, True)])
def test_dropout_copies_what_it_does_not_drop(p: float, train: bool) -> None:
    x = torch.ones(3, 2)
    with FakeTensorMode() as mode, strides_of_kernels():
        fake = mode.from_tensor(x)
        found = torch.native_dropout(fake, p, train)
    kept, mask = torch.native_dropout(x, p, train)
    assert (kept.data_ptr() == x.data_ptr()) == (found[0].untyped_storage()._cdata == fake.untyped_storage()._cdata)
    assert [each.dtype for each in found] == [kept.dtype, mask.dtype]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 2, 2), (6, 2, 2, 4)])
@pytest.mark.parametrize("norm", fake_mode._NORMS, ids=str)
def test_statistics_have_the_dtype_of_kernels(norm: Any, shape: tuple[int, ...], affine: bool) -> None:
    """In float32 where only the input is bfloat16, as under autocast; torch's fakes have the input's: the control."""
    x = torch.ones(shape, dtype=torch.bfloat16).permute(0, 3, 1, 2) if shape[1] == 2 else torch.ones(shape).bfloat16()
    size = x.shape[-1] if norm is aten.native_layer_norm.default else x.shape[1]
    weight = torch.ones(size) if affine else None
    args: Any = {
        aten.native_batch_norm.default: (weight, weight, torch.zeros(size), torch.ones(size), True, 0.1, 1e-5),
        aten.native_group_norm.default: (weight, weight, x.shape[0], size, math.prod(x.shape[2:]), 2, 1e-5),
        aten.native_layer_norm.default: ([size], weight, weight, 1e-5),
    }[norm]
    found = []
    for scope in (nullcontext, strides_of_kernels):
        with FakeTensorMode() as mode, scope():
            fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in (x, *args)]
            found.append([(each.dtype, each.stride()) for each in norm(*fakes)])
    kernels = [(each.dtype, each.stride()) for each in norm(x, *args)]
    assert found[1] == kernels
    # The fake of torch 2.14 loses channels last where it normalises groups.
    is_lost = norm is aten.native_group_norm.default and shape[1] == 2 and RELEASE == (2, 14)
    assert (found[0] == kernels) == (not affine and norm is not aten.native_batch_norm.default and not is_lost)


LATER = {aten.native_layer_norm_backward.default: (2, 3, 1)}
"""Shapes of all tensors but the first two."""
CORRECTED = fake_mode._LIKE_FIRST | fake_mode._CONTIGUOUS | fake_mode._IN_FORMAT_OF.keys()


@pytest.mark.parametrize("operator", sorted(CORRECTED, key=str), ids=str)
def test_fake_results_have_the_strides_of_kernels(operator: Any) -> None:
    """Torch's own differ for at least one order of the dims: the control."""
    are_torchs_right = []
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
        statistics = torch.rand(LATER.get(operator, (2, 3, 4)))
        values = itertools.chain(map(_permuted, orders), itertools.repeat(statistics))
        numbers = iter(NUMBERS.get(operator, ()))
        args = [
            next(values) if str(argument.type) == "Tensor" else next(numbers)
            for argument in operator._schema.arguments
        ]
        expected = _strides(operator(*args))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
            are_torchs_right.append(_strides(operator(*fakes)) == expected)
            with strides_of_kernels():
                assert _strides(operator(*fakes)) == expected
    assert not all(are_torchs_right)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_batch_norm_has_the_memory_format_of_its_input(memory_format: torch.memory_format) -> None:
    x = torch.rand(2, 3, 4, 5).contiguous(memory_format=memory_format)
    gradient = torch.rand(2, 3, 4, 5)  # contiguous
    forward = (x, *NUMBERS[aten.native_batch_norm.default])
    backward = (gradient, x, *NUMBERS[aten.native_batch_norm_backward.default])
    for operator, args in ((aten.native_batch_norm, forward), (aten.native_batch_norm_backward, backward)):
        expected = _strides(operator(*args))
        assert expected[0] == x.stride()
        with FakeTensorMode() as mode, strides_of_kernels():
            fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
            assert _strides(operator(*fakes)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_matrices_of_each_dtype(dtype: torch.dtype) -> None:
    """The control: up to 2.14 torch's own fake takes bfloat16 alone."""
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)
    shapes = [((8, 16), (3, 16, 8)), ((16, 8), (8, 8)), ((3, 16, 8), (8, 8)), ((3, 4, 8), (3, 8, 8))]
    for (a, b), offs in zip(shapes, (ends, ends, ends, None), strict=True):
        args = (torch.rand(a).to(dtype), torch.rand(b).to(dtype), offs)
        expected = torch.ops.aten._grouped_mm.default(*args)
        with FakeTensorMode() as mode:
            fakes = [arg if arg is None else mode.from_tensor(arg) for arg in args]
            with strides_of_kernels():
                result = torch.ops.aten._grouped_mm.default(*fakes)
            assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
            is_taken = dtype == torch.bfloat16 or RELEASE >= (2, 15)
            with nullcontext() if is_taken else pytest.raises(RuntimeError, match=r"BF16|Float16"):
                torch.ops.aten._grouped_mm.default(*fakes)


def _permuted(order: tuple[int, ...]) -> Tensor:
    return torch.rand([(2, 3, 4)[dim] for dim in order]).permute(*map(order.index, range(3)))


def _strides(result: Any) -> list[tuple[int, ...]]:
    values = result if isinstance(result, tuple) else (result,)
    return [value.stride() for value in values if value is not None]


def test_what_an_operator_writes_keeps_its_sizes() -> None:
    with FakeTensorMode() as mode:
        row, whole = torch.empty(1, 8), torch.empty(8, 8)
    result = fake_calls.fake_call(mode, aten.unsqueeze_.default, (row, 0), {})
    assert (result.shape, row.shape) == ((1, 1, 8), (1, 8))
    assert result.untyped_storage()._cdata == row.untyped_storage()._cdata
    # From 2.14 on torch's fake refuses it, as the kernel does.
    resized = pytest.warns(UserWarning, match="was resized")
    is_resized = RELEASE == (2, 13)
    with resized if is_resized else pytest.raises(RuntimeError, match="broadcast"):
        fake_calls.fake_call(mode, aten.eq_.Tensor, (row, whole), {})
    assert row.shape == (1, 8)


def test_results_of_one_trace_serve_the_next() -> None:
    def num_misses() -> int:
        before = FakeTensorMode.cache_misses
        with FakeTensorMode() as mode, strides_of_kernels():
            (mode.from_tensor(torch.ones(17, 19, 23)) + 1).sum()
        return FakeTensorMode.cache_misses - before

    assert num_misses() > 0
    assert num_misses() == 0


def test_results_of_graphs_are_not_kept() -> None:
    """They are known by the ids of these, which another graph may have next."""
    operators = aten.sin.default, torch.ops.higher_order.invoke_subgraph
    keys = [_DispatchCacheKey((operator,)) for operator in operators]
    with strides_of_kernels():
        for key in keys:
            FakeTensorMode.cache[key] = None
    assert [key in fake_mode._RESULTS for key in keys] == [True, False]
    del fake_mode._RESULTS[keys[0]]


@pytest.fixture
def one_rank() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_into_tensor", "all_reduce_coalesced"])
def test_what_collectives_bring_lies_as_kernels_leave_it(one_rank: str, name: str) -> None:
    operator = getattr(torch.ops._c10d_functional, name).default
    given = {"broadcast": 0, "all_gather_into_tensor": 1}.get(name, "sum")
    channels_last = torch.ones(4, 2, 3, 3).to(memory_format=torch.channels_last)
    for x in (torch.ones(3, 4).T, torch.ones(4, 6)[:, ::2], channels_last):
        found = []
        for mode in (nullcontext(), FakeTensorMode()):
            with mode, strides_of_kernels():
                sent = mode.from_tensor(x) if isinstance(mode, FakeTensorMode) else x
                brought = operator([sent] if "coalesced" in name else sent, given, one_rank)
                (tensor,) = brought if isinstance(brought, list) else [brought]
            found.append(torch.ops._c10d_functional.wait_tensor(tensor).stride())
        assert found[0] == found[1]
