"""Command line: ``python -m experiments.graph_trainer_bench --help``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tyro
from rich.table import Table

from experiments.graph_trainer_bench.steps import VARIANTS, measure
from experiments.graph_trainer_bench.volume import Volume, volumes
from experiments.graph_trainer_parity.ranks import stores
from experiments.harness.bench import Row, timing_table
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity.launch import run_ranks
from graphpasses.terminal import make_console

_RECIPES = {
    "llama3 debug": Recipe("llama3"),
    "llama3 debug, tied": Recipe("llama3", tied=True),
    "qwen3 debug, tied": Recipe("qwen3", tied=True),
}
_FULL_SIZE = {
    "llama3 1B, tied": Recipe("llama3", flavor="1B", tied=True),
    "qwen3 1.7B, tied": Recipe("qwen3", flavor="1.7B", tied=True),
}


def main(rounds: int = 20) -> None:
    """Times steps of torchtitan's trainers on 2 gloo processes, and counts the bytes that they send.

    Args:
        rounds: counted rounds; each runs one step of every trainer.
    """
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="graphpasses-") as scratch:
        make_assets(Path(scratch))
        rows = []
        for name, recipe in _RECIPES.items():
            console.print(f"{name}: {rounds} rounds …")
            with stores(1) as ports:
                costs = run_ranks(measure, 2, recipe, rounds, Path(scratch), ports, timeout=3600.0)[0]
            for variant in VARIANTS:
                cost = costs[variant]
                cells = (f"{cost.num_bytes / 1e6:.2f}", str(cost.num_collectives))
                rows.append(Row(name, variant, cost.timing, cells))
        columns = ("MB sent per rank and step", "collectives")
        console.print(timing_table("Training steps, 2 gloo processes", rows, columns))
        found = {}
        for name, recipe in _FULL_SIZE.items():
            console.print(f"{name}: tracing …")
            (found[name],) = run_ranks(volumes, 1, recipe, 64, Path(scratch), timeout=3600.0)
        console.print(_volume_table(found))


def _volume_table(found: dict[str, dict[str, Volume]]) -> Table:
    table = Table("model, 64 ranks", "passes", title="read from the graph of a step, not run")
    for column in ("MB sent per rank and step", "of that, reductions", "collectives"):
        table.add_column(column, justify="right")
    for name, by_passes in found.items():
        table.add_section()
        for index, (passes, (num_bytes, num_reduced, num_collectives)) in enumerate(by_passes.items()):
            megabytes = (f"{size / 1e6:,.0f}" for size in (num_bytes, num_reduced))
            table.add_row("" if index else name, passes, *megabytes, str(num_collectives))
    return table


if __name__ == "__main__":
    tyro.cli(main)
