"""Command line: ``python -m experiments.pass_bench --help``."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import tyro
from rich.table import Table

from experiments.pass_bench.full_size import NUM_RANKS, FullSizeTiming, time_passes
from graphpasses.terminal import make_console


def main(flavors: tuple[str, ...] = ("8B", "70B", "405B"), rounds: int = 5) -> None:
    """Times the default pipeline, and torchtitan's passes for the same work, on full-size Llama 3 steps.

    The steps are traced on fake tensors, with a fake process group of 64 ranks. Each model has a process of its own.

    Args:
        flavors: of torchtitan's Llama 3.
        rounds: how often our pipeline runs, for its median. The first round is compared with torchtitan's, which
            runs once.
    """
    console = make_console()
    timings = []
    for flavor in flavors:
        console.print(f"Llama 3 {flavor}: tracing for {NUM_RANKS} ranks")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            timings.append(pool.submit(time_passes, flavor, rounds).result())
    console.print(_table(timings))
    console.print(
        "graphpasses generates code once, at the step's first call; torchtitan's passes do after each"
    )


def _table(timings: list[FullSizeTiming]) -> Table:
    table = Table(title="Seconds of all passes")
    for header in ("", *(f"Llama 3 {timing.flavor}" for timing in timings)):
        table.add_column(header, justify="right" if header else "left")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("nodes of the captured step", *(f"{timing.ours.num_nodes:,}" for timing in timings))
    row("capture of SimpleFSDP's model", *(f"{timing.capture:.1f}" for timing in timings))
    row("capture of the FSDP2 model", *(f"{timing.capture_fsdp2:.1f}" for timing in timings))
    ours = [timing.ours.timing.first + timing.code for timing in timings]
    row("graphpasses: first round, code generated", *(f"{seconds:.2f}" for seconds in ours))
    row("  first round, checks and copy included", *(f"{timing.ours.timing.first:.2f}" for timing in timings))
    row("  generating code", *(f"{timing.code:.2f}" for timing in timings))
    row("  median round", *(f"{timing.ours.timing.median:.2f}" for timing in timings))
    per_node = (timing.ours.timing.median / timing.ours.num_nodes for timing in timings)
    row("  median round, µs per node", *(f"{seconds * 1e6:.0f}" for seconds in per_node))
    for name in timings[0].ours.by_pass:
        row(f"  {name}, fastest round", *(f"{timing.ours.by_pass[name]:.2f}" for timing in timings))
    row("  MB of memory", *(f"{timing.memory / 1e6:.0f}" for timing in timings))
    row("proof that the rewritten step has eager's bits", *(f"{timing.proof:.2f}" for timing in timings))
    row("  MB of memory", *(f"{timing.proof_memory / 1e6:.0f}" for timing in timings))
    theirs = [sum(timing.theirs.values()) for timing in timings]
    row("graph_trainer's own: first round, code generated", *(f"{total:.2f}" for total in theirs))
    for name in timings[0].theirs:
        row(f"  {name}", *(f"{timing.theirs[name]:.2f}" for timing in timings))
    row("times as fast", *(f"{total / seconds:.1f}" for total, seconds in zip(theirs, ours, strict=True)))
    return table


if __name__ == "__main__":
    tyro.cli(main)
