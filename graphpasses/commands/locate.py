"""``graphpasses locate``: the operator at which two runs part."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions
from graphpasses.commands.exit_codes import EXIT_DIFFERENT, EXIT_EQUAL
from graphpasses.errors import TaskError


def locate(
    source: Annotated[str, Positional, arg(metavar="TASK|RUN_A")],
    run_b: Annotated[Path | None, Positional, arg(metavar="RUN_B")] = None,
    /,
    *,
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    steps: int = 5,
    out: Path = Path("runs/locate"),
    json: bool = False,
) -> int:
    """Find the first operator that gives another result on equal inputs, or where two runs call different operators.

    Of a task, as graphpasses parity takes it: trains it both ways, runs the first step that differs again with all
    operators recorded, then with fewer and fewer passes, names the pass and its rewrite, and writes a script that
    reproduces it. Of two run files: both recorded the operators of the first step that differs, with
    ParityRecorder(..., operators=[STEP]). Operators are compared rank by rank, in all bits of what goes into them
    and comes out.

    Exit codes: 0 the runs are equal, 1 they differ, and it says where, 2 it cannot be said (the reason is on
    stderr).

    Example: graphpasses locate my_model.py --ranks 4 --gpus-per-node 2 --steps 2

    Args:
        source: A Python file or module that defines a task; or, with RUN_B, the first run, e.g. eager's.
        run_b: The second run.
        cluster: The cluster on which a task is trained.
        steps: Optimizer steps of a task in which to look for a difference.
        out: Folder for a task's run files and for the script.
        json: Print one JSON object instead of text.
    """
    from graphpasses.parity.location import locate_runs, location_to_json, render_location
    from graphpasses.parity.run_file import read_run

    if run_b is not None:
        location = locate_runs(read_run(source), read_run(run_b))
    elif source.endswith(".jsonl"):
        raise TaskError(f"'{source}' is a run; give a second one to compare it with, or a task")
    elif steps < 1:
        raise TaskError(f"--steps is {steps}; it must be at least 1")
    else:
        from graphpasses.parity.bisection import locate_task
        from graphpasses.parity.training import load_task

        location = locate_task(load_task(source), cluster.topology(), steps, out, source=source)
    if json:
        print(jsonlib.dumps(location_to_json(location), indent=2))
    else:
        print(render_location(location))
    return EXIT_EQUAL if location.difference is None else EXIT_DIFFERENT
