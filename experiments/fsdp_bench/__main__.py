"""Command line: ``python -m experiments.fsdp_bench --help``."""

from __future__ import annotations

import sys

import tyro
from rich.console import Console
from rich.table import Table

from experiments.fsdp_bench.pipeline import time_pipeline
from experiments.fsdp_bench.steps import summarize, time_steps
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline

PASSES = [p.name for p in default_pipeline(BucketPlan(())).passes]


def main(layers: int = 6, dim: int = 256, rounds: int = 20, sizes: tuple[int, ...] = (4, 16, 64)) -> None:
    """Times training steps on 4 gloo processes, and the pipeline at several sizes of a model.

    Args:
        layers: layers of the model whose steps are timed.
        dim: its width.
        rounds: counted rounds; each runs one step of every way.
        sizes: numbers of layers at which the pipeline is timed.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"timing steps: {layers} layers, dim {dim}, {rounds} rounds …")
    seconds = run_ranks(
        time_steps,
        4,
        layers,
        dim,
        rounds,
        preload=("torch.distributed.fsdp", "torchtitan.experiments.graph_trainer.make_fx_tracer"),
        timeout=3600.0,
    )
    table = Table("way", "ms per step (median)", "times as fast as eager (median of rounds)")
    for name, milliseconds, ratio in summarize(seconds[0]):
        table.add_row(name, f"{milliseconds:.1f}", f"{ratio:.2f}")
    console.print(table)

    table = Table("layers", "nodes", "pipeline, ms", title="ms per 1,000 nodes, from the fourth column on")
    for column in ("all", *(name.replace("-", " ") for name in PASSES), "checks, copy"):
        table.add_column(column, justify="right")
    for size in sizes:
        num_nodes, total, by_pass = time_pipeline(size)
        seconds = [total, *(by_pass[name] for name in PASSES), total - sum(by_pass.values())]
        per_thousand = (f"{value * 1e6 / num_nodes:.0f}" for value in seconds)
        table.add_row(str(size), f"{num_nodes:,}", f"{total * 1e3:.0f}", *per_thousand)
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
