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
        rounds: how often our pipeline runs after its first run, for its median.
    """
    console = make_console()
    timings = []
    for flavor in flavors:
        console.print(f"Llama 3 {flavor}: tracing for {NUM_RANKS} ranks")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            timings.append(pool.submit(time_passes, flavor, rounds).result())
    console.print(_table(timings))
    console.print(
        "graphpasses generates code once, at the step's first call; torchtitan's passes do after each. First runs "
        "are with Python's garbage collector on, as a process starts; torchtitan's trainer turns it off"
    )


def _table(timings: list[FullSizeTiming]) -> Table:
    table = Table(title="CPU seconds of all passes")
    for header in ("", *(f"Llama 3 {timing.flavor}" for timing in timings)):
        table.add_column(header, justify="right" if header else "left")

    def row(name: str, *cells: str, end_section: bool = False) -> None:
        table.add_row(name, *cells, end_section=end_section)

    row("nodes of the captured step", *(f"{timing.ours.num_nodes:,}" for timing in timings))
    row("capture of SimpleFSDP's model", *(f"{timing.capture:.1f}" for timing in timings))
    row("capture of the FSDP2 model", *(f"{timing.capture_fsdp2:.1f}" for timing in timings))
    first = [sum(timing.first) for timing in timings]
    row("graphpasses: first run in the process, code generated", *(f"{seconds:.2f}" for seconds in first))
    row("  default pipeline, checks and copy included", *(f"{timing.first[0]:.2f}" for timing in timings))
    row("  generating code", *(f"{timing.first[1]:.2f}" for timing in timings))
    theirs_first = [sum(timing.theirs_first.values()) for timing in timings]
    row("graph_trainer's own: first run in the process", *(f"{total:.2f}" for total in theirs_first))
    for name in timings[0].theirs_first:
        row(f"  {name}", *(f"{timing.theirs_first[name]:.2f}" for timing in timings))
    row("times as fast", *_ratios(theirs_first, first), end_section=True)

    ours = [timing.ours.timing.median + timing.code for timing in timings]
    row("graphpasses, garbage collector off", *(f"{seconds:.2f}" for seconds in ours))
    row("  median round", *(f"{timing.ours.timing.median:.2f}" for timing in timings))
    per_node = (timing.ours.timing.median / timing.ours.num_nodes for timing in timings)
    row("  median round, µs per node", *(f"{seconds * 1e6:.0f}" for seconds in per_node))
    for name in timings[0].ours.by_pass:
        row(f"  {name}, fastest round, seconds", *(f"{timing.ours.by_pass[name]:.2f}" for timing in timings))
    row("  MB of memory", *(f"{timing.memory / 1e6:.0f}" for timing in timings))
    row("  generating code", *(f"{timing.code:.2f}" for timing in timings))
    theirs = [sum(timing.theirs.values()) for timing in timings]
    row("graph_trainer's own, garbage collector off", *(f"{total:.2f}" for total in theirs))
    row("times as fast", *_ratios(theirs, ours))
    row("floor: the captured graph's copy and code", *(f"{timing.floor:.2f}" for timing in timings))
    row("  graph_trainer's own over the floor", *_ratios(theirs, [t.floor for t in timings]), end_section=True)
    row("proof that the rewritten step has eager's bits", *(f"{timing.proof:.2f}" for timing in timings))
    row("  MB of memory", *(f"{timing.proof_memory / 1e6:.0f}" for timing in timings))
    return table


def _ratios(theirs: list[float], ours: list[float]) -> list[str]:
    return [f"{their / our:.1f}" for their, our in zip(theirs, ours, strict=True)]


if __name__ == "__main__":
    tyro.cli(main)
