"""Sixty common rewrites that keep all bits, which a proof should prove, and must not call different."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.attack.expressions import emit
from experiments.attack.judge import Attacked, Finding
from experiments.attack.program import Program
from experiments.mutants.edits import Copy
from graphpasses.graph import TrainGraph

PROGRAM = Program(
    (
        "p = x * 0.5",
        "q = self.c * 3.0",
        "h = x.bfloat16()",
        "a = torch.sinh(p + q) * h",
        "self.k0.copy_(a.view(-1))",
        "return self.u.square().sum() + a.sum()",
    )
)
"""In its step the statements of a row stand for ``a``."""

RIGHT = """
neutral factor | mul.Tensor(p, 1.0) | p
neutral divisor | div.Tensor(p, 1) | p
zero subtracted | sub.Tensor(p, 0.0) | p
minus zero added | add.Tensor(p, -0.0) | p
negated twice | neg(neg(p)) | p
minus a negative | sub.Tensor(p, neg(q)) | add.Tensor(p, q)
plus a negative | add.Tensor(p, neg(q)) | sub.Tensor(p, q)
times minus one | mul.Tensor(p, -1.0) | neg(p)
twice the same | add.Tensor(p, p) | mul.Tensor(p, 2.0)
halves | mul.Tensor(p, 0.5) | div.Tensor(p, 2.0)
two powers of two | mul.Tensor(mul.Tensor(p, 2.0), 2.0) | mul.Tensor(p, 4.0)
number or tensor | mul.Scalar(p, 3.0) | mul.Tensor(p, 3.0)
sum commuted | add.Tensor(p, q) | add.Tensor(q, p)
product commuted | mul.Tensor(p, q) | mul.Tensor(q, p)
comparison turned | where.self(gt.Tensor(p, q), p, q) | where.self(lt.Tensor(q, p), p, q)
ReLU twice | relu(relu(p)) | relu(p)
absolute value of -x | abs(neg(p)) | abs(p)
through fp64 | to(to(p, dtype=f64), dtype=dtype) | p
cast to its own dtype | to(p, dtype=dtype) | p
bf16 widened twice | neg(to(to(h, dtype=dtype), dtype=bf16)) | neg(h)
cast, then view | view(to(view(h, [64]), dtype=dtype), shape) | to(h, dtype=dtype)
cast of a join | slice.Tensor(to(cat([h, h]), dtype=dtype), 0, 8, 16) | to(h, dtype=dtype)
negation of a cast | to(neg(h), dtype=dtype) | neg(to(h, dtype=dtype))
a detour by bits | view.dtype(view.dtype(p, bits), dtype) | p
view and back | view(view(p, [64]), shape) | p
reshape or view | reshape(reshape(p, [64]), shape) | view(view(p, [-1]), shape)
transposed twice | t(t(p)) | p
permute or transpose | cat([permute(p, [1, 0])]) | cat([t(p)])
squeezed | squeeze.dim(unsqueeze(p, 0), 0) | p
slice of all | slice.Tensor(p, 0, 0, 9223372036854775807) | p
slice of a slice | cat([slice.Tensor(slice.Tensor(p, 0, 2, 8), 0, 1, 5), half])
  | cat([slice.Tensor(p, 0, 3, 7), half])
select or slice | cat([expand(select.int(p, 0, 3), shape)])
  | cat([expand(squeeze.dim(slice.Tensor(p, 0, 3, 4), 0), shape)])
alias | alias(p) | p
detach | detach(p) | p
expand to its own shape | expand(p, shape) | p
flipped twice | flip(flip(p, [0]), [0]) | p
copy | clone(p) | p
split, joined | s = split.Tensor(p, 4); cat([getitem(s, 0), getitem(s, 1)]) | p
joined, split | getitem(split.Tensor(cat([p, q]), 8), 1) | q
slice of a join | slice.Tensor(cat([p, q]), 0, 8, 16) | q
split or slice | cat([getitem(split.Tensor(p, 4), 1), half]) | cat([slice.Tensor(p, 0, 4, 8), half])
split by sizes | cat([getitem(split_with_sizes(p, [4, 4]), 0), half])
  | cat([getitem(split.Tensor(p, 4), 0), half])
unbind or select | cat([expand(getitem(unbind.int(p), 2), shape)]) | cat([expand(select.int(p, 0, 2), shape)])
join of joins | slice.Tensor(cat([cat([p, q]), p]), 0, 8, 16) | slice.Tensor(cat([p, q, p]), 0, 8, 16)
stack, select | select.int(stack([p, q]), 0, 1) | q
padded, cut | cat([slice.Tensor(constant_pad_nd(p, [0, 2]), 1, 0, 8)]) | p
common subexpression | add.Tensor(exp(p), exp(p)) | r = exp(p); add.Tensor(r, r)
dead code | r = exp(p); relu(p) | relu(p)
dead draw-free write | r = clone(q); s = add_.Tensor(r, 1.0); relu(p) | relu(p)
sunk past a write | r = exp(p); s = add_.Tensor(q, 1.0); add.Tensor(r, s)
  | s = add_.Tensor(q, 1.0); r = exp(p); add.Tensor(r, s)
reordered | r = exp(p); s = relu(q); sub.Tensor(r, s) | s = relu(q); r = exp(p); sub.Tensor(r, s)
recomputed | r = exp(p); add.Tensor(r, mul.Tensor(r, q)) | add.Tensor(exp(p), mul.Tensor(exp(p), q))
in place | r = exp(p); relu(r) | r = exp(p); relu_(r)
copied, then written | add.Tensor(p, 1.0) | r = clone(p); add_.Tensor(r, 1.0)
filled, then copied into | r = zeros_like(p); copy_(r, p) | clone(p)
written in parts | r = zeros_like(p); copy_(slice.Tensor(r, 0, 0, 4), half); copy_(slice.Tensor(r, 0, 4, 8), half); r
  | cat([half, half])
ones | mul.Tensor(p, full(shape, 1.0)) | mul.Tensor(p, ones(shape))
alpha spelled out | add.Tensor(p, q, alpha=1) | add.Tensor(p, q)
dim by name, from behind | getitem(sort(p, dim=1), 0) | getitem(sort(p, -1), 0)
scale spelled out | view(getitem(attention(heads, heads, heads, scale=1 / 8**0.5), 0), shape)
  | view(getitem(attention(heads, heads, heads), 0), shape)
"""
"""Name, statements before, statements after: on ``p``, ``q``, ``h`` and what is made of them below."""


def judge_right_rewrites() -> Iterator[tuple[str, Finding]]:
    """Yields what the proof says of each rewrite, and whether a run agrees."""
    with PROGRAM.captured() as step:
        assert step is not None
        for row in RIGHT.replace("\n  |", " |").strip().splitlines():
            name, before, after = row.split(" | ")
            yield name, Attacked(_with(step, before)).judge(_with(step, after), is_right=True)


def _with(step: TrainGraph, text: str) -> TrainGraph:
    """Returns a copy of the step in which statements make ``a``."""
    graph = step.copy()
    nodes = {node.name: node for node in graph.graph.nodes}
    values = {"p": nodes["mul"], "q": nodes["mul_1"], "h": nodes["_to_copy"]}
    made, copy, like = nodes["mul_2"], Copy(graph, nodes), nodes["mul"]
    for name, of in {"half": "slice.Tensor(q, 0, 0, 4)", "heads": "view(p, [1, 1, 8, 8])"}.items():
        values[name] = emit(copy, made, of, like, **values)
    made.replace_all_uses_with(emit(copy, made, text, like, **values))
    graph.graph.erase_node(made)
    return graph
