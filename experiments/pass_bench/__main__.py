"""Command line: ``python -m experiments.pass_bench --help``."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import tyro
from rich.console import Console
from rich.table import Table

from experiments.pass_bench.full_size import NUM_RANKS, Timing, time_passes


def main(flavors: tuple[str, ...] = ("8B", "70B", "405B"), rounds: int = 5) -> int:
    """Times the default pipeline, and torchtitan's passes for the same work, on full-size Llama 3 steps.

    The steps are traced on fake tensors for 64 ranks that exist in name only. Each model has a process of its own.

    Args:
        flavors: of torchtitan's Llama 3.
        rounds: how often our pipeline runs; the fastest counts. torchtitan's runs once.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    timings = []
    for flavor in flavors:
        console.print(f"Llama 3 {flavor}: tracing for {NUM_RANKS} ranks")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            timings.append(pool.submit(time_passes, flavor, rounds).result())
    console.print(_table(timings))
    console.print(
        "graphpasses generates code once, at the step's first call; torchtitan's time has it after every pass"
    )
    return 0


def _table(timings: list[Timing]) -> Table:
    table = Table(title="Seconds of all passes")
    for header in ("", *(f"Llama 3 {timing.flavor}" for timing in timings)):
        table.add_column(header, justify="right" if header else "left")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("nodes of the captured step", *(f"{timing.num_nodes:,}" for timing in timings))
    row("tracing", *(f"{timing.capture:.1f}" for timing in timings))
    for name in timings[0].ours:
        if name != "whole":
            row(f"  {name}", *(f"{timing.ours[name]:.2f}" for timing in timings))
    row("graphpasses, checks and copy included", *(f"{timing.ours['whole']:.2f}" for timing in timings))
    row("  µs per node", *(f"{timing.ours['whole'] / timing.num_nodes * 1e6:.0f}" for timing in timings))
    row("  MB of memory", *(f"{timing.memory / 1e6:.0f}" for timing in timings))
    row("  generating code", *(f"{timing.code:.2f}" for timing in timings))
    for name in timings[0].theirs:
        row(f"  {name}", *(f"{timing.theirs[name]:.2f}" for timing in timings))
    sums = [sum(timing.theirs.values()) for timing in timings]
    row("graph_trainer's own", *(f"{total:.2f}" for total in sums))
    quotients = zip(sums, timings, strict=True)
    row("times as fast", *(f"{total / timing.ours['whole']:.1f}" for total, timing in quotients))
    return table


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
