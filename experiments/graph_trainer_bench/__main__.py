"""Command line: ``python -m experiments.graph_trainer_bench --help``."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from experiments.graph_trainer_bench.steps import VARIANTS, measure
from experiments.graph_trainer_bench.volume import volumes
from experiments.graph_trainer_parity.cases import DEFAULTS, EAGER, OURS
from experiments.graph_trainer_parity.ranks import stores
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity.launch import run_ranks

_RECIPES = {
    "llama3 debug": Recipe("llama3"),
    "llama3 debug, tied": Recipe("llama3", tied=True),
    "qwen3 debug, tied": Recipe("qwen3", tied=True),
}
_FULL_SIZE = {
    "llama3 1B, tied": Recipe("llama3", flavor="1B", tied=True),
    "qwen3 1.7B, tied": Recipe("qwen3", flavor="1.7B", tied=True),
}


def main(rounds: int = 20, out: Path = Path("runs/graph_trainer_bench")) -> None:
    """Times steps of torchtitan's trainers on 2 gloo processes, and counts the bytes that they send.

    Args:
        rounds: counted rounds; each runs one step of every trainer.
        out: folder for torchtitan's files.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    make_assets(out)
    table = Table("model", "trainer", "ms per step (median)", "times as fast as eager (median of rounds)")
    for column in ("MB sent per rank and step", "collectives"):
        table.add_column(column, justify="right")
    for name, recipe in _RECIPES.items():
        console.print(f"{name}: {rounds} rounds …")
        with stores(1) as ports:
            results = run_ranks(measure, 2, recipe, rounds, out.absolute(), ports, timeout=3600.0)[0]
        for variant in VARIANTS:
            cost = results[variant]
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(results[EAGER].seconds, cost.seconds, strict=True)
            )
            table.add_row(
                name if variant == EAGER else "",
                variant,
                f"{cost.milliseconds:.0f}",
                f"{ratio:.2f}",
                f"{cost.num_bytes / 1e6:.2f}",
                str(cost.num_collectives),
                end_section=variant == VARIANTS[-1],
            )
    console.print(table)

    table = Table("model, 64 ranks", "passes", title="read from the graph of a step, not run")
    for column in ("MB sent per rank and step", "of that, reductions", "collectives"):
        table.add_column(column, justify="right")
    for name, recipe in _FULL_SIZE.items():
        console.print(f"{name}: tracing …")
        (found,) = run_ranks(volumes, 1, recipe, 64, out.absolute(), timeout=3600.0)
        for passes, (num_bytes, num_reduced, num_collectives) in found.items():
            table.add_row(
                name if passes == DEFAULTS else "",
                passes,
                f"{num_bytes / 1e6:,.0f}",
                f"{num_reduced / 1e6:,.0f}",
                str(num_collectives),
                end_section=passes == OURS,
            )
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
