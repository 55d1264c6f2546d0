"""``graphpasses parity``: your model, trained both ways on a simulated cluster."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions
from graphpasses.commands.exit_codes import EXIT_OF
from graphpasses.errors import TaskError


def parity(
    task: Annotated[str, Positional, arg(metavar="TASK")],
    /,
    *,
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    steps: int = 5,
    out: Path = Path("runs/parity"),
    json: bool = False,
) -> int:
    """Train a model with eager FSDP2 and as a rewritten graph on a simulated cluster, and compare them bit for bit.

    Every rank is real, a thread of this process; reductions add in the order of NCCL's rings. TASK is a Python file
    or module that defines model(), shard(model, mesh), which calls fully_shard, loss_fn(model, *batch) and
    batch(step, rank); and, if you want, optimizer(parameters), name, seed, and num_replicas for HSDP.

    Exit codes: 0 the graph has eager's bits at every step, 1 it has other bits, 2 the runs could not be compared.

    Example: graphpasses parity my_model.py --ranks 4 --gpus-per-node 2 --steps 2

    Args:
        task: A Python file or module.
        cluster: The cluster.
        steps: Optimizer steps.
        out: Folder for the run files, eager.jsonl and graph.jsonl.
        json: Print one JSON object instead of tables.
    """
    from rich.progress import Progress

    from graphpasses.parity.compare import compare_runs
    from graphpasses.parity.report import comparison_to_json, render_comparison
    from graphpasses.parity.run_file import read_run
    from graphpasses.parity.training import load_task, train_eager, train_graph
    from graphpasses.terminal import make_console

    if steps < 1:
        raise TaskError(f"--steps is {steps}; it must be at least 1")
    topology = cluster.topology()
    loaded = load_task(task)
    out.mkdir(parents=True, exist_ok=True)
    paths = {name: out / f"{name}.jsonl" for name in ("eager", "graph")}
    for path in paths.values():  # If this command is interrupted, no run of another one lies beside its own.
        path.unlink(missing_ok=True)
    console = make_console()
    with Progress(console=console, disable=not console.is_terminal or json) as progress:
        for name, train in (("eager", train_eager), ("graph", train_graph)):
            progress.add_task(f"{name}, {topology.num_ranks} ranks", total=steps)
            train(
                loaded,
                topology,
                steps,
                paths[name],
                done=lambda num: progress.update(progress.task_ids[-1], completed=num),
            )
    comparison = compare_runs(*map(read_run, paths.values()))
    if json:
        print(jsonlib.dumps(comparison_to_json(comparison), indent=2))
    else:
        console.print(render_comparison(comparison))
        console.print(f"to look at it: graphpasses report {paths['eager']} {paths['graph']}", markup=False)
        if comparison.divergence is not None:
            options = shlex.join([task, *cluster.arguments(), "--steps", str(steps)])
            console.print(f"to find the operator and the pass: graphpasses locate {options}", markup=False)
    return EXIT_OF[comparison.verdict]
