"""Random training steps: programs of a small language of statements, which are Python and print as such."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpasses as gp
from experiments.attack.running import error_of, num_ranks_of, run
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import GraphPassesError
from graphpasses.graph import CapturedStep

STATE = {
    "w": "nn.Parameter(torch.randn(8, 8))",
    "v": "self.w",
    "u": "nn.Parameter(torch.randn(32))",
    "h": "nn.Parameter(torch.randn(4, 8).bfloat16())",
    "g": "nn.Parameter(torch.randn(2, 3, 4).half())",
    "d": "nn.Parameter(torch.randn(3, 8).double().t())",
    "b": "nn.Buffer(torch.zeros(16))",
    "c": "nn.Buffer(torch.ones(8, 8))",
    "z": "nn.Buffer(torch.zeros(4, 8, dtype=torch.bfloat16))",
    "k0": "nn.Buffer(torch.zeros(64))",
    "k1": "nn.Buffer(torch.zeros(64))",
}
"""What a program may read as ``self.NAME``, and how it is made; it reads the batch ``x``, ``i``, too."""

STATEMENTS = {
    "elementwise": """
        {x} + {y} | {x} - {y} | {x} * {y} | {x} / {y} | {x} + {c} | {x} * {c} | {x} / {c} | {x} - {c} | -{x}
        {x}.relu() | {x}.tanh() | {x}.exp() | {x}.square() | {x}.rsqrt() | torch.add({x}, {y}, alpha={c})
        torch.maximum({x}, {y}) | torch.where({x} > {c}, {x}, {y}) | torch.addcmul({x}, {y}, {y}) | {x}.abs()
        F.gelu({x}) | F.silu({x}) | {x} ** 3 | {c} - {x} | {c} / {x} | torch.lerp({x}, {y}, {c})
        {x}.sigmoid() | {x}.clamp(min={c}) | {x} * {y}.float().mean() | {x}.half() * {y}.float().sum()""",
    "views": """
        {x}.t() | {x}.transpose(0, -1) | {x}.reshape(-1) | {x}.view(-1) | {x}.view(4, -1) | {x}[{k}:]
        {x}[:, {k}:] | {x}[::2] | {x}.as_strided((3, 4), (4, 1), {k}) | {x}.unsqueeze({d}) | {x}.detach()
        {x}.expand(2, *{x}.shape) | {x}.narrow({d}, {k}, 2) | {x}.select({d}, {k}) | {x}.diagonal()
        torch.ops.aten._unsafe_view({x}, [-1]) | {x}.unfold(0, 2, 1) | {x}.clone() | {x}.contiguous()
        {x}.reshape(2, -1) | {x}.t().contiguous() | {x}.flatten(0, 1) | {x}.permute(1, 0) | {x}[:{k}]
        {x}.view(torch.int32) | {x}.view(torch.uint8) | {x}.flip(0) | {x}.roll({k}, 0) | F.pad({x}, ({k}, 1))""",
    "lists": """
        {x}.chunk(2, {d})[{k}] | {x}.split(3, {d})[{k}] | {x}.unbind({d})[{k}] | torch.cat([{x}, {y}], {d})
        torch.stack([{x}, {y}], {d}) | torch.cat({x}.split(3, {d}), {d}) | sum({x}.unbind(0))
        torch.cat({x}.split(3, {d})[::-1], {d}) | torch.cat([{x}.reshape(-1), {y}.reshape(-1)])
        torch.cat([{x}[{k}:], {x}[:{k}]])""",
    "writes": """
        {x}.add_({y}) | {x}.mul_({c}) | {x}[{k}:].copy_({y}) | {x}[1:].copy_({x}[:-1].clone()) | {x}.zero_()
        {x}[::2].add_({y}) | {x}.fill_({c}) | {x}.sub_({y}, alpha={c}) | {x}[{k}].copy_({y}) | {x}.relu_()
        {x}.neg_() | {x}[..., {k}].zero_() | {x}.copy_({y}) | {x}.div_({c}) | {x}.clamp_(min={c})
        {x}[:4].mul_({x}[4:]) | {x}.t().add_({y}) | {s}.add_({x}.detach().reshape(-1)[:16])
        {s}.copy_({x}.detach()) | {s}.mul_({c}) | {s}[{k}:5].copy_({s}[:3].clone()) | {s}.zero_()
        {s}[{k}:8].copy_({x}.detach().reshape(-1)[:3]) | {s}.add_({s}.clone()) | {s}.lerp_({x}.detach(), 0.5)
        {x}.unfold(0, 2, 1).mul_({c}) | {x}.as_strided((3, 4), (2, 1), {k}).add_({y}) | {s}.clamp_(max={c})
        {s}.view(-1).unfold(0, 2, 1).add_({c}) | {s}.view(torch.uint8)[{k}].copy_({s}.view(torch.uint8)[3])
        torch._foreach_mul_([{s}[1], {s}[{k}]], {s}[{k}]) | torch._foreach_add_([{s}[2], {s}[3]], {s}[2].clone())
        torch._foreach_add_([{s}[:4], {s}[4:8]], [{s}[8:12], {s}[{k}:6].clone()[:4]]) | {s}.mul_({x}.float().mean())
        {s}[::2].copy_({s}[:8].clone()) | {s}[1:].add_({s}[:-1].clone()) | {s}.view(-1)[{k}:].mul_({c})""",
    "reductions": """
        {x}.sum() | {x}.sum({d}) | {x}.mean({d}) | {x}.amax({d}) | {x}.cumsum({d}) | {x}.softmax({d})
        {x}.norm() | {x}.var({d}) | {x}.logsumexp({d}) | {x}.prod({d}) | {x}.sum({d}, keepdim=True)
        F.layer_norm({x}, {x}.shape[-1:]) | {x}.sum(dtype=torch.float64) | {x}.argmax({d}) | {x}.mean()
        {x}.sort({d})[0] | {x}.log_softmax({d}) | {x}.max({d})[0]""",
    "matmuls": """
        {x} @ {y} | {x} @ {y}.t() | {x}.t() @ {y} | F.linear({x}, {y}) | F.linear({x}, {y}, {x}[0])
        torch.dot({x}, {y}) | torch.addmm({x}, {y}, {y}) | torch.mv({x}, {y}) | torch.outer({x}, {y})
        F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None]) | torch.bmm({x}[None], {y}[None])
        F.linear({x}[None], {y}) | F.linear({x}, self.w)""",
    "casts": """
        {x}.to(torch.{t}) | {x}.float() | {x}.double() | {x}.bfloat16().float() | {x}.to(torch.{t}) + {c}
        {x}.to(torch.{t}).to(torch.{t}) | {x}.long() | {x}.to(torch.uint8) | {x}.to(torch.int32) | {x}.half()
        {x}.to(torch.{t}, copy=True)""",
    "constants": """
        torch.zeros(8{on}) | torch.ones(8, 8{on}) | torch.full((8,), {c}{on}) | {x}.new_zeros(8) | torch.eye(8{on})
        torch.zeros_like({x}) | torch.ones(4{on}).view(torch.int32) | torch.full_like({x}, {c})
        torch.arange(8.0{on}) | torch.tensor([1.0, -0.0, 3.0, 0.5]{on})""",
    "random": """
        F.dropout({x}) | torch.rand_like({x}) | {x} + torch.randn_like({x}) | torch.rand(8{on})
        torch.bernoulli({x}.detach().sigmoid()) | {x}.detach().clone().uniform_()""",
    "collectives": """
        c10d.wait_tensor(c10d.all_reduce({x}.detach(), "sum", "0"))
        c10d.wait_tensor(c10d.all_reduce({x}.detach(), "avg", "0"))
        c10d.wait_tensor(c10d.all_gather_into_tensor({r}, 2, "0"))
        c10d.wait_tensor(c10d.reduce_scatter_tensor({r}, "sum", 2, "0"))
        c10d.wait_tensor(c10d.all_to_all_single({r}, [4, 4], [4, 4], "0"))""",
    "lookups": """
        F.embedding(i, {x}) | F.embedding(i, self.w) | {x}[i] | {x}.index_select(0, i)
        {x}.index_add(0, i, {y}) | {x}.index_put((i,), {y}) | {x}.gather(0, i[:, None])""",
}
"""By kind: ``{x}``, ``{y}`` are values, ``{r}`` is one that has rows, ``{s}`` state, ``{c}`` a number, ``{k}`` a
small integer, ``{d}`` a dim, ``{on}`` says on which device a tensor is made."""

_SCOPE = {"torch": torch, "nn": nn, "F": F, "c10d": torch.ops._c10d_functional}
_CONSTANTS = ("0.0", "-0.0", "1.0", "2.0", "0.5", "0.1", "3", "-1.0", "1e-40", "1e30", "float('nan')")
_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Program:
    """What a model's ``forward(self, x, i)`` does, and how it is trained.

    Args:
        lines: the statements; the last returns the loss.
        optimizer: whether AdamW updates the parameters in the step.
        rows: whether the number of rows of ``x`` may vary from call to call.
        device: on which it runs.
    """

    lines: tuple[str, ...]
    optimizer: bool = False
    rows: bool = False
    device: str = "cpu"

    @property
    def source(self) -> str:
        """The model as Python."""
        read = {name for line in self.lines for name in re.findall(r"self\.(\w+)", line)}
        read |= {"w"} if "v" in read else set()
        state = "".join(f"\n        self.{name} = {value}" for name, value in STATE.items() if name in read)
        body = "".join(f"\n        {line}" for line in self.lines)
        return (
            f"class Model(nn.Module):\n    def __init__(self):\n        super().__init__(){state}\n\n"
            f"    def forward(self, x, i):{body}\n"
        )

    @contextmanager
    def captured(self) -> Iterator[CapturedStep | None]:
        """Captures the step, on two ranks if it has collectives; None if it does not run, or cannot be captured.

        In the block there is the process group.
        """
        with fake_process_group(2) if any("c10d." in line for line in self.lines) else nullcontext():
            step = self._capture()
            yield None if step is None or error_of(run(step, "normal", num_ranks_of(step))) else step

    def _capture(self) -> CapturedStep | None:
        scope: dict[str, Any] = dict(_SCOPE)
        try:
            exec(compile(self.source, "<program>", "exec"), scope)
            torch.manual_seed(0)
            scope["Model"]()(*_batch("cpu")).backward()  # where an index that is too large is an error of Python's
        except Exception:  # of a program from which statements were deleted anything may be wrong
            return None
        with torch.device(self.device):
            model: nn.Module = scope["Model"]()
        adam = torch.optim.AdamW(model.parameters()) if self.optimizer else None
        try:
            return gp.capture_train_step(
                _loss,
                model,
                *_batch(self.device),
                optimizer=adam,
                check=False,
                dynamic_shapes=({0: torch.export.Dim("rows")}, None) if self.rows else None,
            )
        except (GraphPassesError, RuntimeError):  # what runs need not be traced
            return None


def _loss(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def _batch(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, device=device), torch.tensor([1, 0, 1, 3], device=device)


def random_program(rng: random.Random, num_statements: int, device: str = "cpu") -> Program:
    """Makes a program each of whose statements runs on a CPU.

    Args:
        rng: decides.
        num_statements: so many, beside those that keep values in buffers, and the loss.
        device: on which it is to run. On a GPU it has no collectives, which play on CPUs, and neither lookups
            nor random numbers: an index that is too large, or a probability that is none, ends a process there.
    """
    with fake_process_group(2):
        return _random_program(rng, num_statements, device)


def _random_program(rng: random.Random, num_statements: int, device: str) -> Program:
    scope: dict[str, Any] = {**_SCOPE, "self": SimpleNamespace()}
    torch.manual_seed(0)
    for name, value in STATE.items():
        setattr(scope["self"], name, eval(value, scope))
    scope["x"], scope["i"] = _batch("cpu")
    kinds = [*STATEMENTS, "writes", "writes", "views"]
    if rng.random() < 0.8 or device != "cpu":  # two ranks take longer
        kinds.remove("collectives")
    if device != "cpu":
        kinds.remove("lookups")
        kinds.remove("random")
    favoured = rng.choices(kinds, k=3)  # programs are of different kinds
    rows = rng.random() < 0.25
    lines: list[str] = []
    values: list[str] = []
    for _ in range(20 * num_statements):
        if len(lines) == num_statements:
            break
        kind = rng.choice(kinds + 2 * favoured)
        text = _fill(rng, rng.choice(_STATEMENTS[kind]), values, _OF_ROWS if rows else _READ)
        line = text if kind == "writes" else f"{(new := f'a{len(values)}')} = {text}"
        try:
            exec(line, scope)
        except Exception:
            continue
        if kind != "writes":
            if not isinstance(scope[new], Tensor) or scope[new].numel() > 256:
                continue
            values.append(new)
        lines.append(line)
    lines += _ending(rng, scope, values)
    return Program(tuple(lines), optimizer=rng.random() < 0.2, rows=rows, device=device)


_STATEMENTS = {
    kind: [each.strip() for line in text.strip().splitlines() for each in line.split("|")]
    for kind, text in STATEMENTS.items()
}


_READ = ("x", "x", "self.w", "self.v", "self.u", "self.h", "self.g", "self.d", "self.b")
_OF_ROWS = ("x", "x", "x", "x", "x", "x", "self.w", "self.u")  # others have as many rows as one batch


def _fill(rng: random.Random, template: str, values: list[str], read: Sequence[str]) -> str:
    def operand() -> str:
        if values and rng.random() < 0.7:
            return rng.choice(values[-4:] if rng.random() < 0.6 else values)
        return rng.choice(read)

    x, y = operand(), operand()
    return template.format(
        x=x,
        r=f"torch.atleast_1d({x}.detach())",  # torch 2.13 crashes where it cuts a number into rows
        y=x if rng.random() < 0.1 else y,
        s=rng.choice(["self.b", "self.c", "self.z"]),
        c=rng.choice(_CONSTANTS),
        k=rng.randrange(4),
        d=rng.choice([0, 0, 1, -1]),
        t=rng.choice(_DTYPES),
        on=", device=x.device",
    )


def _ending(rng: random.Random, scope: dict[str, Any], values: list[str]) -> Iterator[str]:
    """Yields statements that let bits of values be seen: copies in buffers, and the loss."""
    small = [name for name in values if scope[name].numel() <= 64]
    for buffer, name in zip(("k0", "k1"), rng.sample(small, min(2, len(small))), strict=False):
        yield f"self.{buffer}[:{scope[name].numel()}].copy_({name}.detach().reshape(-1))"
    used = [name for name in values[::-1] if scope[name].requires_grad][:3]
    terms = [f"{name}.{rng.choice(('float', 'double'))}().{rng.choice(('sum', 'mean'))}()" for name in used]
    yield f"return {' + '.join([*terms, 'self.u.square().sum()'])}"
