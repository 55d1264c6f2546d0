"""Command line: ``python -m experiments.fsdp_bench --help``."""

from __future__ import annotations

import tyro
from rich.table import Table

from experiments.fsdp_bench.memory import Memory, measure_memory
from experiments.fsdp_bench.pipeline import time_default_pipeline
from experiments.fsdp_bench.steps import EAGER, FSDP2, UNCHECKED, WHOLE, time_steps
from experiments.harness.bench import Row, timing_table
from experiments.harness.pipeline_timing import PipelineTiming
from graphpasses.parity.launch import run_ranks
from graphpasses.terminal import make_console

_PRELOAD = ("torch.distributed.fsdp", "torchtitan.experiments.graph_trainer.make_fx_tracer")


def main(
    layers: int = 6,
    dim: int = 256,
    rounds: int = 20,
    sizes: tuple[int, ...] = (4, 16, 64),
    memory: tuple[int, int] = (4, 2048),
) -> None:
    """Times training steps on 4 gloo processes, measures their memory, and times the pipeline at several sizes.

    Args:
        layers: layers of the model whose steps are timed.
        dim: its width.
        rounds: counted rounds; each runs one step of every variant.
        sizes: numbers of layers at which the pipeline is timed.
        memory: layers and width of the model whose memory is measured.
    """
    console = make_console()
    console.print(f"timing steps: {layers} layers, dim {dim}, {rounds} rounds …")
    timings = run_ranks(time_steps, 4, layers, dim, rounds, preload=_PRELOAD, timeout=3600.0)[0]
    case = f"{layers} layers of {dim}"
    rows = [Row(case, variant, timing) for variant, timing in timings.items()]
    console.print(timing_table("Training steps, 4 gloo processes", rows))
    console.print(f"measuring memory: {memory[0]} layers, dim {memory[1]} …")
    variants = (EAGER, FSDP2, WHOLE, UNCHECKED)
    console.print(_memory_table({variant: _measure(variant, *memory) for variant in variants}))
    console.print(_pipeline_table({size: time_default_pipeline(size) for size in sizes}))


def _measure(variant: str, layers: int, dim: int) -> Memory:
    found: Memory = run_ranks(measure_memory, 4, variant, layers, dim, preload=_PRELOAD, timeout=3600.0)[0]
    return found


def _memory_table(found: dict[str, Memory]) -> Table:
    baseline = found[EAGER]
    title = f"Peak resident memory of a rank, {baseline.num_parameters / 1e6:,.0f} M parameters on 4 gloo processes"
    table = Table("variant", title=title)
    for column in ("before the model, MB", "capture, 2 steps, MB", "peak of 3 steps, MB", "to eager's"):
        table.add_column(column, justify="right")
    for variant, memory in found.items():
        numbers = (f"{size / 1e6:,.0f}" for size in (memory.before, memory.first, memory.peak))
        table.add_row(variant, *numbers, f"{memory.peak / baseline.peak - 1:+.1%}")
    return table


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
