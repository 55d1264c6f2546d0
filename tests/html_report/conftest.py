"""Recorded runs of a few lines, for reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.graph.pass_report import Hunk, Numerics, PassReport, PipelineReport
from graphpasses.parity.run_file import (
    Loss,
    Run,
    RunHeader,
    StepRecord,
    end_line,
    header_line,
    passes_line,
    read_run,
    step_line,
)
from graphpasses.simulate import Topology

CLUSTER = Topology(16, gpus_per_node=8)
SHAPES = {"up.weight": (512, 100), "up.bias": (512,), "norm.weight": (100,)}
EAGER = ("up.weight", "up.bias", "norm.weight")
BIAS_FIRST = ("up.bias", "up.weight", "norm.weight")
PASSES = PipelineReport(
    (
        PassReport(
            "bucket-fsdp-collectives",
            Numerics.BITWISE,
            2,
            (40, 33),
            ({"all_gather_into_tensor": 6, "all_reduce": 1}, {"all_gather_into_tensor": 2, "all_reduce": 1}),
            0.0125,
            ("layers.0.<b>.weight: has no gradient",),
            (Hunk(("  x = placeholder", "- y = aten.relu.default(x)"), ("  x = placeholder",), 3),),
            num_left_out=4,
        ),
    ),
    proof="12 values proved equal in bits, 0 not proved; ms: 3.0",
)
WriteRun = Callable[..., Run]


def layout(order: Sequence[str] = EAGER, num_layers: int = 2, num_ranks: int = 16) -> Layout:
    return Layout(
        tuple(
            make_bucket_layout(
                "reduce_scatter",
                range(num_ranks),
                "avg",
                torch.bfloat16,
                [(f"layers.{index}.{fqn}", SHAPES[fqn], 0) for fqn in order],
            )
            for index in range(num_layers)
        )
    )


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run of some steps and reads it back."""

    def write(
        name: str,
        its_layout: Layout | None = None,
        *,
        num_steps: int = 4,
        differs: dict[int, Sequence[str]] | None = None,
        passes: PipelineReport | None = None,
        cut: int = 0,
        seed: int = 0,
        num_ranks: int = 16,
    ) -> Run:
        fqns = [f"layers.{index}.{fqn}" for index in range(2) for fqn in SHAPES]
        topology = asdict(CLUSTER) if num_ranks == 16 else None
        header = RunHeader("2.13.0", num_ranks, name, "two layers", seed, topology, its_layout)
        lines = [header_line(header)]
        if passes is not None:
            lines.append(passes_line({"step": passes}))
        for step in range(num_steps):
            changed = (differs or {}).get(step, ())
            hashes = {fqn: "1" * 32 if fqn in changed else "0" * 32 for fqn in fqns}
            loss = Loss("float32", ("00000000",) * num_ranks, (repr(4.0 - step),) * num_ranks)
            lines.append(step_line(StepRecord(step, loss, hashes, hashes)))
        path = tmp_path / f"{name}.jsonl"
        whole = b"".join([*lines, end_line(num_steps)])
        path.write_bytes(whole[: len(whole) - cut])
        return read_run(path)

    return write
