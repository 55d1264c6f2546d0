"""Command line: ``python -m experiments.fsdp_bench --help``."""

from __future__ import annotations

import tyro
from rich.table import Table

from experiments.fsdp_bench.pipeline import time_default_pipeline
from experiments.fsdp_bench.steps import time_steps
from experiments.harness.bench import Row, timing_table
from experiments.harness.pipeline_timing import PipelineTiming
from graphpasses.parity.launch import run_ranks
from graphpasses.terminal import make_console

_PRELOAD = ("torch.distributed.fsdp", "torchtitan.experiments.graph_trainer.make_fx_tracer")


def main(layers: int = 6, dim: int = 256, rounds: int = 20, sizes: tuple[int, ...] = (4, 16, 64)) -> None:
    """Times training steps on 4 gloo processes, and the pipeline at several sizes of a model.

    Args:
        layers: layers of the model whose steps are timed.
        dim: its width.
        rounds: counted rounds; each runs one step of every variant.
        sizes: numbers of layers at which the pipeline is timed.
    """
    console = make_console()
    console.print(f"timing steps: {layers} layers, dim {dim}, {rounds} rounds …")
    timings = run_ranks(time_steps, 4, layers, dim, rounds, preload=_PRELOAD, timeout=3600.0)[0]
    case = f"{layers} layers of {dim}"
    rows = [Row(case, variant, timing) for variant, timing in timings.items()]
    console.print(timing_table("Training steps, 4 gloo processes", rows))
    console.print(_pipeline_table({size: time_default_pipeline(size) for size in sizes}))


def _pipeline_table(timings: dict[int, PipelineTiming]) -> Table:
    table = Table("layers", "nodes", "pipeline, ms", title="ms per 1,000 nodes, from the fourth column on")
    passes = list(next(iter(timings.values())).by_pass)
    for column in ("all", *(name.replace("-", " ") for name in passes), "checks, copy"):
        table.add_column(column, justify="right")
    for size, found in timings.items():
        whole = found.timing.fastest
        seconds = [whole, *found.by_pass.values(), found.rest]
        per_thousand = (f"{value * 1e6 / found.num_nodes:.0f}" for value in seconds)
        table.add_row(str(size), f"{found.num_nodes:,}", f"{whole * 1e3:.0f}", *per_thousand)
    return table


if __name__ == "__main__":
    tyro.cli(main)
