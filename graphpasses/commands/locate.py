"""``graphpasses locate``: the operator at which two runs part."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from graphpasses.commands.exit_codes import EXIT_DIFFERENT, EXIT_EQUAL

__all__ = ["locate"]


def locate(
    run_a: Annotated[Path, Positional, arg(metavar="RUN_A")],
    run_b: Annotated[Path, Positional, arg(metavar="RUN_B")],
    /,
    *,
    json: bool = False,
) -> int:
    """Find the first operator whose inputs agree in two runs and whose result does not, or where their paths part.

    Both runs recorded the operators of the first step that differs, with ParityRecorder(..., operators=[STEP]). Their
    operators are compared rank by rank, in all bits of what goes into them and comes out.

    Exit codes: 0 the runs are equal, 1 they part, and it says where, 2 it cannot be said (the reason is on stderr).

    Example: graphpasses locate eager.jsonl compiled.jsonl

    Args:
        run_a: The first run, e.g. eager's.
        run_b: The second run.
        json: Print one JSON object instead of text.
    """
    from graphpasses.parity.location import locate_runs, location_to_json, render_location
    from graphpasses.parity.run_file import read_run

    location = locate_runs(read_run(run_a), read_run(run_b))
    if json:
        print(jsonlib.dumps(location_to_json(location), indent=2))
    else:
        print(render_location(location))
    return EXIT_EQUAL if location.difference is None else EXIT_DIFFERENT
