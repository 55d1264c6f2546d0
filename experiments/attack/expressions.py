"""Expressions on operators of ATen, which rewrites put into a graph: what is equal, or almost."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from experiments.mutants.edits import Copy

IDENTITIES = {
    True: """
        neg(neg(x))
        mul.Tensor(x, 1.0)
        div.Tensor(x, 1)
        sub.Tensor(x, 0.0)
        add.Tensor(x, -0.0)
        maximum(x, x)
        to(to(x, dtype=f64), dtype=dtype)
        view.dtype(view.dtype(x, bits), dtype)
        clone(x)
        alias(x)
        view(x, shape)
        _unsafe_view(x, shape)
        reshape(reshape(x, [-1]), shape)
        squeeze.dim(unsqueeze(x, 0), 0)
        cat([x])
        select.int(stack([x]), 0, 0)
        flip(flip(x, [0]), [0])
        """,
    False: """
        add.Tensor(x, 0.0)
        mul.Tensor(mul.Tensor(x, 2.0), 0.5)
        mul.Tensor(mul.Tensor(x, 0.5), 2.0)
        div.Tensor(mul.Tensor(x, 0.1), 0.1)
        add.Tensor(x, mul.Tensor(x, 0.0))
        where.self(eq.Tensor(x, x), x, zeros_like(x))
        abs(x)
        sum.dim_IntList(unsqueeze(x, 0), [0])
        to(to(x, dtype=f32), dtype=dtype)
        to(to(x, dtype=f16), dtype=dtype)
        slice.Tensor(constant_pad_nd(x, [0, 1]), -1, 0, shape[-1])
        view(slice.Tensor(cat([zeros([3], dtype=dtype), view(x, [-1])]), 0, 3, 3 + numel(x)), shape)
        """,
}
"""Calls that give a float tensor back: all bits of it, and almost."""

LAWS = """
add.Tensor: add.Tensor(b, a) | sub.Tensor(a, neg(b)) | neg(add.Tensor(neg(a), neg(b))) | sub.Tensor(b, neg(a))
add.Tensor: mul.Tensor(add.Tensor(mul.Tensor(a, 0.5), mul.Tensor(b, 0.5)), 2.0) | add.Scalar(a, b)
sub.Tensor: add.Tensor(a, neg(b)) | neg(sub.Tensor(b, a)) | add.Tensor(neg(b), a) | sub.Scalar(a, b)
mul.Tensor: mul.Tensor(b, a) | neg(mul.Tensor(neg(a), b)) | div.Tensor(a, reciprocal(b)) | mul.Scalar(a, b)
mul.Tensor: mul.Tensor(mul.Tensor(a, 2.0), mul.Tensor(b, 0.5)) | mul.Tensor(neg(a), neg(b))
mul.Scalar: mul.Tensor(a, b) | mul.Scalar(mul.Scalar(a, 2.0), b / 2) | div.Scalar(a, 1 / b) | neg(mul.Scalar(a, -b))
div.Tensor: mul.Tensor(a, reciprocal(b)) | neg(div.Tensor(a, neg(b))) | div.Scalar(a, b) | mul.Tensor(a, 1 / b)
div.Scalar: div.Tensor(a, b) | mul.Scalar(a, 1 / b) | div.Scalar(div.Scalar(a, 2), b / 2)
pow.Tensor_Scalar: mul.Tensor(a, a) | mul.Tensor(mul.Tensor(a, a), a) | alias(a)
relu: clamp_min(a, 0) | maximum(a, zeros_like(a)) | where.self(gt.Scalar(a, 0), a, zeros_like(a))
maximum: maximum(b, a) | where.self(gt.Tensor(a, b), a, b)
where.self: where.self(logical_not(a), c, b)
threshold_backward: mul.Tensor(a, gt.Scalar(b, 0)) | where.self(gt.Scalar(b, 0), a, zeros_like(a))
sum: sum(view(a, [-1])) | sum(t(a)) | sum(sum.dim_IntList(a, [0])) | to(sum(to(a, dtype=f64)), dtype=dtype)
mean: div.Tensor(sum(a), numel(a)) | mul.Tensor(sum(a), 1 / numel(a)) | mean(view(a, [-1]))
mm: t(mm(t(b), t(a))) | mm(clone(a), b) | mm(a, t(clone(t(b))))
mm: select.int(bmm(unsqueeze(a, 0), unsqueeze(b, 0)), 0, 0)
addmm: add.Tensor(mm(b, c), a) | add.Tensor(a, mm(b, c))
bmm: unsqueeze(mm(squeeze.dim(a, 0), squeeze.dim(b, 0)), 0) | bmm(clone(a), b)
clone: a | view(a, shape) | _unsafe_view(a, shape) | reshape(a, shape) | alias(a) | clone(clone(a))
view: a | clone(view(a, shape)) | _unsafe_view(a, shape) | reshape(a, shape) | clone(_unsafe_view(a, shape))
_unsafe_view: view(a, shape) | clone(view(a, shape)) | reshape(a, shape)
detach: a | clone(a) | _unsafe_view(a, shape)
slice.Tensor: clone(slice.Tensor(a, b, c, d)) | a
_to_copy: a | to(a.args[0], dtype=dtype) | alias(a)
_to_copy: to(to(a, dtype=f64), dtype=dtype) | to(to(a, dtype=f32), dtype=dtype) | to(to(a, dtype=bf16), dtype=dtype)
t: transpose.int(a, 1, 0) | permute(a, [1, 0]) | clone(t(a)) | t(clone(a))
expand: clone(expand(a, shape)) | add.Tensor(a, zeros(shape, dtype=dtype)) | mul.Tensor(a, ones(shape, dtype=dtype))
cat: cat([clone(each) for each in a], b) | cat(a[::-1], b) | cat(a[0].args[0], b) | a[0].args[0].args[0]
ones_like: full(shape, 1.0, dtype=dtype) | add.Tensor(zeros_like(a), 1) | div.Tensor(a, a)
neg: mul.Tensor(a, -1.0) | sub.Tensor(zeros_like(a), a) | rsub.Scalar(a, 0) | rsub.Scalar(a, -0.0)
"""
"""By operator, what a call of it is in other words, or almost, of its arguments ``a``, ``b``, ``c``."""

ELSEWHERE = """
view(call(lambda x: view(x, [-1])), shape)
t(call(t))
flip(call(lambda x: flip(x, [0])), [0])
cat([call(lambda x: slice.Tensor(x, 0, 0, 3)), call(lambda x: slice.Tensor(x, 0, 3, 99))])
slice.Tensor(call(lambda x: cat([x, x])), 0, shape[0], 2 * shape[0])
select.int(call(lambda x: stack([x, x])), 0, 1)
to(call(lambda x: to(x, dtype=f64)), dtype=dtype)
call(clone)
"""
"""A call on its arguments moved, cut, joined or cast; what it returns is put back."""

_SHORT = {"to": "_to_copy", "attention": "_scaled_dot_product_flash_attention_for_cpu"}
_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class _Operator:
    emit: Callable[..., fx.Node]
    packet: Any

    def __getattr__(self, overload: str) -> _Operator:
        return _Operator(self.emit, getattr(self.packet, overload))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit(getattr(self.packet, "default", self.packet), args, kwargs)


class _Names(dict[str, Any]):
    """What the names of an expression are: operators of ATen, beside what is given."""

    emit: Callable[..., fx.Node]

    def __missing__(self, name: str) -> _Operator:
        try:
            return _Operator(self.emit, getattr(torch.ops.aten, _SHORT.get(name, name)))
        except AttributeError:
            raise KeyError(name) from None  # a builtin function


def emit(copy: Copy, place: fx.Node, text: str, like: fx.Node, **values: Any) -> fx.Node:
    """Makes the calls of statements, before a node; the last of them is an expression, whose value is returned.

    Args:
        copy: in which the calls are made.
        place: before it.
        text: statements, between semicolons, on operators of ATen, as ``add.Tensor(x, neg(x))``.
        like: whose ``shape``, ``dtype`` and dtype of ``bits`` the text reads, and what ``call`` calls.
        values: what else the text reads.
    """
    names, value = _Names(values), like.meta["val"]

    def make(target: Any, args: Any, kwargs: Any) -> fx.Node:
        with copy.graph.graph.inserting_before(place):
            return copy.graph.emit(target, args, kwargs, like=place)

    def call(change: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args = fx.node.map_arg(like.args, lambda each: change(copy[each]))
        return make(like.target, args, like.kwargs)

    names.emit = make
    names |= _DTYPES | {"call": call, "getitem": _Operator(make, operator.getitem)}
    names |= {"shape": list(value.shape), "dtype": value.dtype, "bits": _BITS[value.dtype.itemsize]}
    names["numel"] = lambda node: node.meta["val"].numel()
    *statements, last = text.split("; ")
    exec("\n".join(statements), names)
    node: fx.Node = eval(last, names)
    return node
