"""Writes to memory that overlaps with what is read: what protects a read cannot be left out where it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphpasses.capture import capture_train_step
from graphpasses.graph import CapturedStep
from tests.proof.code import Case, Code, Make, Model, X, answer, capture_model, check

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def written(protects: bool, function: str, start: int, is_used: bool = True) -> Make:
    """Writes a part of a buffer by another part, of which a clone may protect it."""

    def make(code: Code) -> fx.Node:
        target = code.slice_Tensor(code.buffer, 0, 0, 16, 2)
        source = code.slice_Tensor(code.buffer, 0, start, start + 8)
        getattr(code, function)(target, code.clone_default(source) if protects else source)
        return code.sum_default(code.x)

    return make


def same_written(protects: bool) -> Make:
    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        return code.add__Tensor(base, code.clone_default(base) if protects else base)

    return make


def matmul_in_place(protects: bool, twice: bool = False) -> Make:
    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        given = code.clone_default(base) if protects else base
        if twice:
            given = code.clone_default(given)
        return code.addmm__default(base, given, code.clone_default(base))

    return make


def foreach_overlaps(protects: bool, twice: bool = False) -> Make:
    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        flat = code.view_default(base, [64])
        targets = [code.slice_Tensor(flat, 0, 0, 8), code.slice_Tensor(flat, 0, 8, 16)]
        sources = [code.slice_Tensor(flat, 0, 24, 32), code.slice_Tensor(flat, 0, 4, 12)]
        for _ in range(protects + twice):
            sources = [code.clone_default(each) for each in sources]
        code.call(aten._foreach_add_.List, targets, sources)
        return code.tanh_default(base)

    return make


def number_of_a_list(protects: bool, twice: bool = False) -> Make:
    """Multiplies two numbers by the first of them, which is written in between, or by a copy of it."""

    def make(code: Code) -> fx.Node:
        one, two = code.sum_default(code.mul_Tensor(code.x, code.x)), code.sum_default(code.x)
        two = code.tanh_default(two)
        other = one
        for _ in range(protects + twice):
            other = code.clone_default(other)
        code.call(aten._foreach_mul_.Tensor, [one, two], other)
        return code.tanh_default(two)

    return make


def three_overlap(clones: str, function: str = "addmm") -> Make:
    """Calls an operator on parts of one memory: what it writes, and two that overlap with it in two ways."""

    def make(code: Code) -> fx.Node:
        base = code.mul_Tensor(code.x, code.x)
        parts = [code.as_strided_default(base, [2, 2], [2, 1], offset) for offset in (0, 1, 3)]
        one, two = (
            code.clone_default(part) if name in clones else part for name, part in zip("ab", parts[1:], strict=True)
        )
        if clones == "aab":
            one = code.clone_default(one)
        if function == "addmm":
            code.addmm__default(parts[0], one, two)
        else:
            code.call(aten._foreach_addcmul_.Scalar, [parts[0]], [one], [two])
        return code.tanh_default(base)

    return make


def lapping(one: bool) -> Make:
    """Multiplies elements that lie on each other: once for each, or for the last."""

    def make(code: Code) -> fx.Node:
        base = code.view_default(code.mul_Tensor(code.x, code.x), [64])
        view = code.unfold_default(base, 0, 2, 1)
        if one:
            code.mul__Tensor(view, 3.0)
        else:
            code.copy__default(view, code.mul_Tensor(view, 3.0))
        return code.tanh_default(base)

    return make


CASES = [
    Case("elements lie on each other", lapping(True), lapping(False), lapping(True)),
    *(
        Case(
            f"{name} of overlapping memory",
            written(True, name, 0),
            written(False, name, 0),
            written(True, name, 0),
        )
        for name in ("copy__default", "add__Tensor", "mul__Tensor")
    ),
    Case("an operand is written", matmul_in_place(True), matmul_in_place(False), matmul_in_place(True, True)),
    Case("lists overlap", foreach_overlaps(True), foreach_overlaps(False), foreach_overlaps(True, True)),
    Case(
        "a number of a list is written",
        number_of_a_list(True),
        number_of_a_list(False),
        number_of_a_list(True, True),
    ),
    *(
        Case(
            f"{name} of three that overlap, {one}",
            *(three_overlap(each, name) for each in ("ab", one, "aab")),
        )
        for name in ("addmm", "addcmul")
        for one in ("", "a", "b")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_overlap(captured: CapturedStep, case: Case) -> None:
    check(captured, case)


@pytest.mark.parametrize(
    "make",
    {
        "a source beside the target": lambda protects: written(protects, "copy__default", 32),
        "an element by itself": same_written,
    }.items(),
    ids=lambda named: named[0],
)
def test_nothing_to_protect(captured: CapturedStep, make: Any) -> None:
    assert answer(captured, make[1](True), make[1](False)) == "proved"


class Three(Model):
    """Its buffers lie in one memory: one is all of it, two others are parts."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(64.0)
        for name, part in {"buffer": whole, "one": whole[:8], "two": whole[8:16]}.items():
            self.register_buffer(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.one.clone().sum() + self.two.clone().sum()


def write_a_part(name: str) -> Make:
    """Reads the whole after a write to one part; then both are written."""

    def make(code: Code) -> fx.Node:
        parts = dict(zip((item.fqn for item in code.step.inputs), code.step.placeholders, strict=True))
        row = code.view_default(code.slice_Tensor(code.x, 0, 0, 1), [8])
        code.copy__default(parts[name], row)
        read = code.tanh_default(parts["buffer"])
        for part in ("one", "two"):
            code.copy__default(parts[part], code.mul_Tensor(row, row))
        return code.sum_default(read)

    return make


def test_three_inputs_in_one_memory() -> None:
    step = capture_train_step(lambda model, x: model(x), Three(), X, check=False)
    assert answer(step, write_a_part("one"), write_a_part("one")) == "proved"
    assert answer(step, write_a_part("one"), write_a_part("two")) != "proved"
