"""Command line: ``python -m experiments.architectures.registry --help``."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import tyro

from experiments.architectures.registry.outcomes import find, read, table, write
from experiments.architectures.registry.types import registered
from experiments.harness.select import Only, select
from graphpasses.parity.launch import end_with_caller
from graphpasses.terminal import make_console


def main(
    steps: int = 5,
    out: Path = Path("runs/registry"),
    only: Only = "",
    workers: int = os.cpu_count() or 1,
) -> int:
    """Trains every causal language model of the installed transformers eagerly and as a graph, in half an hour.

    What is found is added to OUT/outcomes.jsonl, whose types are not trained again: the command may be interrupted.
    Exit code 0 if no type differs or fails, 1 if one does, 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files and for what is found.
        only: train only the types whose name contains this.
        workers: processes, each of which plays a type at a time.
    """
    selected = select(registered(), only)
    if not selected:
        return 2
    out.mkdir(parents=True, exist_ok=True)
    path, console = out / "outcomes.jsonl", make_console()
    known = {each.name for each in read(path)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([find.__module__])
    with ProcessPoolExecutor(workers, context, end_with_caller, max_tasks_per_child=1) as pool:
        play = functools.partial(find, num_steps=steps, folder=out)
        futures = [pool.submit(play, each) for each in selected if each.name not in known]
        for future in as_completed(futures):
            found = future.result()
            write(found, path)
            for each in found:
                console.print(f"{each.name}, {each.dtype}: {each.found} {each.reason}", markup=False)
    names = {each.name for each in selected}
    outcomes = [each for each in read(path) if each.name in names]
    print(table(outcomes))
    return int(any(each.found in ("different", "failed") for each in outcomes))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
