"""Wrong rewrites that look right: none is called proved; beside each a near miss, which is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphpasses.capture import capture_train_step
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep
from graphpasses.proof.prove import prove
from graphpasses.proof.real_memory import would_end_process
from tests.proof.code import OTHER, Case, Code, Make, Model, X, answer, capture_model, check, drawn_again

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


# ---- memory -------------------------------------------------------------------------------------------------------


def read_before_write(view: str, *sizes: Any) -> tuple[Make, Make, Make]:
    """A read of a base stands before, or behind, a write to what an operator makes of it; or reads a copy."""

    def make(order: str) -> Make:
        def function(code: Code) -> fx.Node:
            base = code.mul_Tensor(code.x, code.x)
            other = getattr(code, view)(base, *sizes)
            read = code.tanh_default(base) if order == "before" else None
            copy = code.clone_default(base) if order == "copy" else None
            for each in [code.item(other, 0)] if "split" in view or "unbind" in view else [other]:
                code.add__Tensor(each, 1)
            return read or code.tanh_default(copy or base)

        return function

    return make("before"), make("behind"), make("copy")


def list_moved(behind: bool, copied: bool = False) -> Make:
    def function(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        parts = code.split_Tensor(code.clone_default(base) if copied else base, 4)
        whole = None if behind else code.cat_default(parts)
        code.add__Tensor(base, 1)
        return whole or code.cat_default(parts)

    return function


def root_mean_square(eps: float, is_mean: bool = True) -> Make:
    """An operator on no lists of tensors, that is called as those are that do; it returns two tensors."""

    def make(code: Code) -> fx.Node:
        both = code.call(aten._fused_rms_norm.default, code.x, [8], None, eps)
        return code.sum_default(code.item(both, int(is_mean)))

    return make


def read_transposed(shape: list[int], num_rows: int = 8) -> Make:
    """Writes rows of memory that is first of some shape, and reads all of it transposed."""

    def make(code: Code) -> fx.Node:
        base = code.view_default(code.clone_default(code.view_default(code.x, shape)), [8, 8])
        code.add__Tensor(code.slice_Tensor(base, 0, 0, num_rows), 1)
        return code.tanh_default(code.t_default(base))

    return make


def conjugate(wrong: bool, twice: bool = False) -> Make:
    def make(code: Code) -> fx.Node:
        base = code._to_copy_default(code.x, dtype=torch.complex64)
        base = code.mul_Tensor(base, 1j)
        view = base if wrong else code._conj_default(base)
        if twice:
            view = code.view_default(view, [8, 8])
        code.add__Tensor(view, 1j)
        return code.abs_default(base)

    return make


def constant_twice(second: bool, first: bool = True) -> Make:
    def make(code: Code) -> fx.Node:
        one, two = code.constant(), code.constant()
        read = code.tanh_default(two) if first else None
        code.add__Tensor(one, 1.0)
        code.add__Tensor(one, -1.0)
        code.add__Tensor(one, 1.0)
        return read or code.tanh_default(code.constant() if second else two)

    return make


# ---- where in its memory an operand lies --------------------------------------------------------------------------


def at_offset(offset: int, function: str = "mm", copies: int = 1) -> Make:
    def make(code: Code) -> fx.Node:
        packed = code.constant_pad_nd_default(code.view_default(code.mul_Tensor(code.x, code.x), [64]), [offset, 32])
        part = code.slice_Tensor(packed, 0, offset, offset + 64)
        operand = code.view_default(part, [8, 8])
        if not offset:
            operand = code.view_default(code.mul_Tensor(code.x, code.x), [8, 8])
        for _ in range(copies if offset else 0):
            operand = code.clone_default(operand) if copies else operand
        if function == "mm":
            return code.mm_default(operand, code.weight)
        return code.tanh_default(operand)

    return make


def input_offset(copies: int, function: str = "mm_default") -> Make:
    def make(code: Code) -> fx.Node:
        x = code.x
        for _ in range(copies):
            x = code.clone_default(x)
        return getattr(code, function)(x, x)

    return make


# ---- constants ----------------------------------------------------------------------------------------------------


def reinterpreted(is_one: bool) -> Make:
    def make(code: Code) -> fx.Node:
        ones = code.ones_default([8], dtype=torch.float32)
        if is_one:
            return code._to_copy_default(code.ones_default([8], dtype=torch.int32), dtype=torch.float32)
        some = code.view_dtype(code.view_dtype(ones, torch.uint8), torch.int32)
        return code._to_copy_default(some, dtype=torch.float32)

    return make


def reinterpreted_back(code: Code) -> fx.Node:
    back = code.view_dtype(code.view_dtype(code.ones_default([8], dtype=torch.int32), torch.uint8), torch.int32)
    return code._to_copy_default(back, dtype=torch.float32)


def multiplied(*factors: float) -> Make:
    def make(code: Code) -> fx.Node:
        product = code.mul_Tensor(code.x, 2.0**-140)
        for each in factors:
            product = code.mul_Tensor(product, each)
        return code.sum_default(product)

    return make


def product_with_a_number(is_first: bool, dtype: torch.dtype) -> Make:
    """Multiplies by a tensor without dims; of another dtype a CPU rounds it to half precision if it stands first."""

    def make(code: Code) -> fx.Node:
        x = code._to_copy_default(code.x, dtype=torch.bfloat16)
        number = code.tanh_default(code._to_copy_default(code.sum_default(code.buffer), dtype=dtype))
        product = code.mul_Tensor(number, x) if is_first else code.mul_Tensor(x, number)
        return code.sum_default(code._to_copy_default(product, dtype=torch.float32))

    return make


def drawn(copied: bool) -> Make:
    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        copy = code.clone_default(base) if copied else code._unsafe_view_default(base, [8, 8])
        code.uniform__default(copy)
        return code.tanh_default(base)

    return make


CASES = [
    Case(
        "of several generators one is set back",
        drawn_again(True, OTHER),
        drawn_again(False, OTHER),
        drawn_again(True, OTHER),
    ),
    Case("a copy is filled with random numbers", drawn(True), drawn(False), drawn(True)),
    *(
        Case(f"{view} shares memory", *read_before_write(view, *sizes))
        for view, sizes in {
            "_unsafe_view_default": ([64],),
            "reshape_default": ([64],),
            "view_dtype": (torch.float32,),
            "alias_default": (),
            "as_strided_default": ([4], [1], 3),
            "diagonal_default": (),
            "unsafe_split_Tensor": (4,),
            "split_Tensor": (4,),
            "unbind_int": (),
            "contiguous_default": (),
            "squeeze_default": (),
        }.items()
    ),
    Case("a list is read behind a write", list_moved(False), list_moved(True), list_moved(False, True)),
    Case("a norm, fused", root_mean_square(1e-5), root_mean_square(1e-3), root_mean_square(1e-5)),
    Case("of its results", root_mean_square(1e-5), root_mean_square(1e-5, False), root_mean_square(1e-5)),
    Case("memory of another shape", read_transposed([8, 8]), read_transposed([64], 4), read_transposed([64])),
    Case("conj shares memory", conjugate(False), conjugate(True), conjugate(False, True)),
    Case("a constant is read twice", constant_twice(False), constant_twice(True, False), constant_twice(False)),
    Case("an operand at another offset", at_offset(0), at_offset(1, copies=0), at_offset(1)),
    Case("an input is where it is", input_offset(0), input_offset(1), input_offset(0)),
    Case("a copy of an input", input_offset(1), input_offset(0), input_offset(2)),
    Case(
        "a factor that is infinite in float32",
        multiplied(2.0**100, 2.0**100),
        multiplied(2.0**200),
        multiplied(2.0**100, 2.0**100),
    ),
    Case(
        "a product in another order, of two dtypes",
        product_with_a_number(False, torch.float32),
        product_with_a_number(True, torch.float32),
        product_with_a_number(False, torch.float32),
    ),
    Case("a constant in another dtype", reinterpreted(True), reinterpreted(False), reinterpreted_back),
]


# Right ones in which nothing protects what needs no protection.
UNPROTECTED: dict[str, tuple[Make, Make]] = {
    "element by element, an offset is nothing": (at_offset(0, "tanh"), at_offset(1, "tanh", 0)),
    "a product in another order": (
        product_with_a_number(False, torch.bfloat16),
        product_with_a_number(True, torch.bfloat16),
    ),
    "of an input, too": (input_offset(0, "mul_Tensor"), input_offset(1, "mul_Tensor")),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attack(captured: CapturedStep, case: Case) -> None:
    check(captured, case)


def beside(view: str, factor: int) -> Make:
    """Reads what lies behind a tensor that begins a larger one, in the memory of that."""

    def make(code: Code) -> fx.Node:
        parts = [code.mul_Tensor(code.x, 2), code.mul_Tensor(code.x, factor)]
        first = code.slice_Tensor(code.cat_default(parts), 0, 0, 8)
        return code.sum_default(getattr(code, view)(first, (8, 8), (8, 1), 64))

    return make


@pytest.mark.parametrize("view", ["as_strided_default", "as_strided_copy_default"])
def test_what_lies_beside_an_operand(captured: CapturedStep, view: str) -> None:
    assert answer(captured, beside(view, 3), beside(view, 3)) == "proved"
    assert answer(captured, beside(view, 3), beside(view, 2)) != "proved"


@pytest.mark.parametrize("name", UNPROTECTED)
def test_nothing_to_protect(captured: CapturedStep, name: str) -> None:
    assert answer(captured, *UNPROTECTED[name]) == "proved"


def returned(view: str, doubles: bool) -> Make:
    """Writes what a call returns, which is its last argument; the first is a view, or a copy, of that."""

    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        given = getattr(code, view)(base)
        sum_ = code.call(aten.add.out, given, code.x, out=base)
        code.mul__Scalar(sum_, 2.0 if doubles else 1.0)
        return code.tanh_default(base)

    return make


def test_who_returns_an_argument_returns_that_one(captured: CapturedStep) -> None:
    code = Code(captured)
    step = code.finished(returned("alias_default", False)(code))
    other = step.copy()
    (view,) = [node for node in other.graph.nodes if node.target == aten.alias.default][-1:]
    view.target = aten.clone.default
    view.meta["val"] = view.meta["val"].clone()
    (scaled,) = other.graph.find_nodes(op="call_function", target=aten.mul_.Scalar)
    assert prove(step, other).proved
    scaled.args = (scaled.args[0], 2.0)
    with pytest.raises(ProofError):
        prove(step, other)


def test_strides_of_a_size_that_depends_on_data(captured: CapturedStep) -> None:
    code = Code(captured)
    ids = code._to_copy_default(code.nonzero_default(code.x), dtype=torch.float32)
    copy = code.clone_default(code.t_default(ids))
    total = code.call(aten.sum.dim_IntList, code.alias_default(copy), [1])
    step = code.finished(code.sum_default(total))
    assert prove(step, step.copy()).proved
    other = step.copy()
    (copy,) = [node for node in other.graph.nodes if node.name == copy.name]
    with other.graph.inserting_after(copy):
        moved = other.emit(aten.clone.default, (copy,), {"memory_format": torch.contiguous_format}, like=copy)
    copy.replace_all_uses_with(moved, lambda user: user is not moved)
    with pytest.raises(ProofError, match="reads a tensor of strides"):  # the alias says that it has the old ones
        prove(step, other)


def test_a_call_that_cannot_run_is_named(captured: CapturedStep) -> None:
    other = captured.copy()
    (product, *_) = other.graph.find_nodes(op="call_function", target=aten.addmm.default)
    product.args = (product.args[0], product.args[1], product.args[0])
    with pytest.raises(ProofError, match=r"addmm cannot be run: aten\.addmm\.default"):
        prove(captured, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_call_without_inputs_is_what_it_says(captured: CapturedStep, dtype: torch.dtype) -> None:
    code = Code(captured)
    ones = code.full_default([8], 0.1, dtype=torch.float32)
    step = code.finished(code.sum_default(code.mul_Tensor(code.x, ones)))
    other = step.copy()
    *_, ones = other.graph.find_nodes(op="call_function", target=aten.full.default)
    ones.kwargs = {"dtype": dtype}  # the fake value is the old one
    if dtype == torch.float32:
        assert prove(step, other).proved
    else:
        with pytest.raises(ProofError):
            prove(step, other)


@torch.library.custom_op("proof_tests::round", mutates_args=("x",))
def round_(x: torch.Tensor) -> None:
    """Rounds at random, as a kernel of another library does, for all that is known of it."""
    x.round_()


@round_.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_a_call_with_a_state_of_its_own_is_left_out(captured: CapturedStep) -> None:
    def make(num_calls: int) -> CapturedStep:
        code = Code(captured)
        for _ in range(num_calls):  # nobody reads what it writes
            code.call(torch.ops.proof_tests.round.default, code.clone_default(code.x))
        return code.finished(code.sum_default(code.x))

    assert prove(make(1), make(1))
    (name, reason), *others = prove(make(1), make(0)).unproved
    assert (name, others) == ("what calls keep that may have a state of their own", [])
    assert reason == "others were made, or in another order"


class PartOfMemory(Model):
    """Its buffer is a part of larger memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.arange(64.0)[:32])


@pytest.mark.parametrize("is_read", [True, False])
def test_a_view_writes_beside_what_it_is_a_view_of(is_read: bool) -> None:
    step = capture_train_step(lambda model, x: model(x), PartOfMemory(), X, check=False)

    def make(*writes: float) -> Make:
        def function(code: Code) -> fx.Node:
            for each in writes:
                code.add__Tensor(code.as_strided_default(code.buffer, [4], [1], 40), each)
            code.copy__default(code.buffer, code.view_default(code.slice_Tensor(code.x, 0, 0, 4), [32]))
            read = code.as_strided_default(code.buffer, [4], [1], 40)
            return code.sum_default(read if is_read else code.x)

        return function

    assert answer(step, make(1.0), make(1.0)) == "proved"
    assert answer(step, make(1.0), make()) != "proved"
    assert answer(step, make(1.0), make(2.0)) != "proved"


def test_what_would_end_the_process_is_not_run() -> None:
    query, key = torch.empty(1, 2, 3, 4), torch.empty(1, 2, 3, 4)
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    few, other = torch.empty(1, 1, 3, 4), torch.empty(2, 1, 3, 4)
    assert not would_end_process(name, {"query": query, "key": key, "value": key})
    assert not would_end_process(name, {"query": query, "key": few, "value": few})
    assert would_end_process(name, {"query": few, "key": key, "value": key})  # 1 // 2 heads
    assert would_end_process(name, {"query": other, "key": few, "value": few})
    assert not would_end_process("aten.add.Tensor", {"self": few, "other": key})
