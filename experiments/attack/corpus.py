"""What the attack found once, each in as few statements as can be; no proof may be wrong of it again."""

from __future__ import annotations

from experiments.attack.case import Case
from graphpasses._torch.tested_versions import RELEASE

_DETACH = "aten.alias.default" if RELEASE > (2, 13) else "aten.detach.default"  # as which a detach is traced
_END = "return self.u.square().sum()"
_PACKED = "view(slice.Tensor(cat([zeros([3], dtype=dtype), view(x, [-1])]), 0, 3, 3 + numel(x)), shape)"

CORPUS = (
    # Memory that a schema says nothing of.
    Case(
        ("a0 = self.b.clone()", "self.b.add_(1.0)", "self.k0[:16].copy_(a0)", _END),
        ("law: aten.clone.default is _unsafe_view(a, shape)",),
    ),
    # Memory that overlaps, with other and with itself.
    Case(("self.b[::2].copy_(self.b[:8].clone())", _END), ("law: aten.clone.default is a",)),
    Case(("self.b[::2].add_(self.b[:8].clone())", _END), ("law: aten.clone.default is a",)),
    Case(("self.b.unfold(0, 2, 1).mul_(2.0)", _END), ("in place: aten.mul_.Tensor is mul(...): copy_(a, new)",)),
    # What in place rounds its number first.
    Case(
        ("a0 = self.g.var(-1)", "a2 = a0.square()", "return a2.float().sum()"),
        ("in place: aten.mul.Scalar is mul_(...): new",),
    ),
    # An operand at an odd offset.
    Case(
        ("a0 = self.c * 2.0", "a1 = torch.mv(a0, self.b[:8])", "self.k0[:8].copy_(a1)", _END),
        (f"identity: aten.mul.Tensor: {_PACKED}",),
    ),
    # A list that is read after a write.
    Case(
        ("a0 = torch.cat(self.b.split(3, 0), 0)", "self.b.add_(1.0)", "self.k0[:16].copy_(a0)", _END),
        (
            "law: aten.cat.default is cat(a[0].args[0], b)",
            "move: aten.cat.default is done before aten.slice.Tensor",
        ),
    ),
    # A constant whose bytes are read in another dtype; one that is written.
    Case(
        ("a0 = torch.ones(4).view(torch.int32).float()", "self.k0[:4].copy_(a0)", _END),
        ("constants: aten._to_copy.default is 1.0",),
    ),
    Case(
        ("a0 = torch.tensor([1.0, -0.0, 3.0, 0.5])", "self.k0[:4].copy_(a0)", _END),
        ("constants: get_attr is written",),
    ),
    # The update reads what the step wrote; a part of a total is lost; an update that divides by zero.
    Case((_END,), ("write: aten.mul.Scalar is copied into placeholder",), optimizer=True),
    Case(("return (self.v + self.w).sum()",), ("lost: output 1, of w, is lost",)),
    Case((_END,), ("law: aten.ones_like.default is div.Tensor(a, a)",), optimizer=True),
    Case((_END,), ("update: write, aten.add_.Tensor is written by aten.zero_.default",), optimizer=True),
    # What cannot be run in a term of which it must be known what it is: one whose shape was changed in place, and
    # parts that lie backwards.
    Case(
        ("a0 = torch.rand(8)", "a1 = F.linear(a0, self.w)", "return a1.float().mean()"),
        ("spelling: arguments of aten.mm.default by name",),
    ),
    Case(
        ("a0 = torch.cat(self.h.split(3, 1)[::-1], 1)", "return a0.float().mean() + self.u.square().sum()"),
        ("identity: aten.add.Tensor: flip(flip(x, [0]), [0])",),
    ),
    Case(
        ("a0 = torch.cat(self.w.split(3, 0)[::-1], 0)", "return a0.double().mean() + self.u.square().sum()"),
        ("identity: aten.sum.default: view.dtype(view.dtype(x, bits), dtype)",),
    ),
    # A write to what overlaps, after something else.
    Case(
        ("a0 = 2.0 - self.d", "a0.unfold(0, 2, 1).mul_(3)", "return a0.float().mean()"),
        ("identity: aten.ones_like.default: flip(flip(x, [0]), [0])",),
    ),
    Case(
        ("a0 = self.b * 2.0", "a0[::2].add_(a0[:8])", "self.k0[:16].copy_(a0)", _END),
        ("identity: aten.mul.Tensor: flip(flip(x, [0]), [0])",),
    ),
    # A number of a dtype in which a CPU does not compute.
    Case(
        ("return self.g.float().mean()",),
        (
            "dtype: aten.ones_like.default passes through torch.float8_e5m2",
            "law: aten._to_copy.default is alias(a)",
        ),
    ),
    # A dim that there is not, of which a fake tensor makes another.
    Case(
        ("a0 = self.w.mean()", "a2 = torch.stack([a0, a0], -1)", "return a2.double().sum()"),
        ("pieces: aten.select.int: argument 1 is -2, not -1",),
    ),
    # A number where a tensor must be.
    Case(
        ("a0 = torch.arange(8.0)", "a1 = a0.to(torch.bfloat16, copy=True)", _END),
        ("law: aten._to_copy.default is to(a.args[0], dtype=dtype)",),
    ),
    # A product whose operands have two dtypes, one of them without dims: one order rounds it.
    Case(
        ("a0 = self.h.bfloat16() * x.float().mean()", "self.k0[:32].copy_(a0.reshape(-1))", _END),
        ("law: aten.mul.Tensor is mul.Tensor(b, a)",),
    ),
    # A number that is one of the tensors that a list operator writes.
    Case(
        ("torch._foreach_mul_([self.b[1], self.b[2]], self.b[1].clone())", _END),
        ("law: aten.clone.default is a",),
    ),
    # An all-to-all whose splits are numbers can be run.
    Case(
        (
            'a0 = c10d.wait_tensor(c10d.all_to_all_single(self.w.detach(), [4, 4], [4, 4], "0"))',
            "self.k0[:64].copy_(a0.reshape(-1))",
            _END,
        ),
        (f"identity: {_DETACH}: flip(flip(x, [0]), [0])",),
    ),
    # Numbers that an update draws.
    Case((_END,), ("update: draws, numbers are drawn before aten.mul_.Tensor",), optimizer=True),
    # A parameter that is not proved, by which the next step's loss differs.
    Case(
        (
            "a0 = F.embedding(i, self.w)",
            "a2 = a0.index_select(0, i)",
            "a3 = a2.index_select(0, i)",
            "return a3.float().mean()",
        ),
        ("operands: aten.index_add.default: aten.new_zeros.default and aten.div.Scalar exchanged",),
        optimizer=True,
    ),
    # Right: what nobody reads is not sent. It runs on two ranks all the same.
    Case(
        (
            "a0 = torch.ones(8, 8)",
            'a1 = c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.atleast_1d(a0.detach()), "sum", 2, "0"))',
            _END,
        ),
        ("constants: _c10d_functional.reduce_scatter_tensor.default is 0.0",),
    ),
    # Right, in other words.
    Case(
        (
            'a0 = c10d.wait_tensor(c10d.all_reduce(self.u.detach(), "sum", "0"))',
            "self.k0[:32].copy_(a0)",
            _END,
        ),
        ("spelling: arguments of _c10d_functional.all_reduce.default by name",),
    ),
    Case((_END,), ("spelling: defaults of aten.sum.default",)),
    Case((_END,), ("spelling: arguments of aten.mul.Scalar by name",)),
    Case((_END,), ("identity: aten.mul.Scalar: sub.Tensor(x, 0.0)",)),
    Case(("a0 = self.c.clone()", "a0.copy_(x)", _END), ("spelling: arguments of aten.copy_.default by name",)),
    # Sizes that may vary, and such as became known.
    Case(
        ("a1 = -1.0 - x", "a2 = a1.view(torch.int32)", "self.k0[:64].copy_(a2.detach().reshape(-1))", _END),
        ("spelling: arguments of aten.rsub.Scalar by name",),
        rows=True,
    ),
    Case(
        ("a0 = x.narrow(1, 1, 2)", "a1 = a0.cumsum(0)", "self.b.add_(a1.detach().reshape(-1)[:16])", _END),
        (f"spelling: defaults of {_DETACH}",),
        rows=True,
    ),
    Case(
        ("a0 = x.narrow(1, 1, 2)", "a1 = a0.cumsum(0)", "self.k1[:16].copy_(a0.detach().reshape(-1))", _END),
        (f"common calls: {_DETACH} has a aten.slice.Tensor",),
        rows=True,
    ),
)

OPEN: dict[Case, str] = {}
"""Of what the proof is still wrong, and how."""
