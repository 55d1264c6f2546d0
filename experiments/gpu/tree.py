"""Canonical reductions' additions on the device: the CPU's bits, and how fast."""

from __future__ import annotations

import torch

from experiments.gpu.result import SkippedError
from experiments.harness.bench import time_rounds
from graphpasses.ops.reduce_in_tree import add_in_tree

__all__ = ["additions_in_tree"]

_KINDS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)


def additions_in_tree(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Sums of 2 to 256 rows on the device against those of the CPU, one row after the other as the control; GB/s."""
    if device != "cuda":
        raise SkippedError("a CPU adds in plain torch; tests/ops/test_reduce_in_tree.py has what this compares with")
    generator = torch.Generator().manual_seed(0)
    same = other = 0
    rows_of = (2, 8, 64, 256)
    for num_rows in rows_of:
        for dtype, accumulate in _KINDS:
            rows = (torch.randn(num_rows, 10_007, generator=generator) * 1000).to(dtype)
            expected = add_in_tree(rows.clone(), accumulate)
            in_turn = rows[0].to(accumulate, copy=True)
            for row in rows[1:]:
                in_turn += row
            same += torch.equal(add_in_tree(rows.to(device), accumulate).cpu(), expected)
            other += not torch.equal(in_turn, expected)
    num_kinds = len(rows_of) * len(_KINDS)
    found = [
        ("as on the CPU", f"{same} of {num_kinds}"),
        ("control, one row after the other", f"{other} of {num_kinds} differ"),
    ]
    for num_rows in (8, 64):
        rows = torch.randn(num_rows, 2**28 // num_rows, device=device).bfloat16()
        slices = rows.view(num_rows, -1, 1)  # of three dims: the kernel takes two
        timings = time_rounds(
            {
                "Triton": lambda _, rows=rows: _finished(add_in_tree(rows)),
                "plain torch": lambda _, rows=slices: _finished(add_in_tree(rows)),
            },
            5,
        )
        for name, timing in timings.items():
            found.append((f"{name}, {num_rows} rows", f"{rows.nbytes / timing.fastest / 1e9:.0f} GB/s read"))
    return same == num_kinds and other > 0, found


def _finished(result: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return result
