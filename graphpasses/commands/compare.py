"""``graphpasses compare``: two recorded runs."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from graphpasses.commands.exit_codes import EXIT_OF
from graphpasses.errors import CompareError
from graphpasses.parity.compare import GapKind


def compare(
    run_a: Annotated[Path, Positional, arg(metavar="RUN_A")],
    run_b: Annotated[Path, Positional, arg(metavar="RUN_B")],
    /,
    *,
    allow: tuple[GapKind, ...] = (),
    json: bool = False,
    max_tensors: int = 20,
) -> int:
    """Compare two recorded runs, step by step and tensor by tensor.

    Reports the first step in which they differ, whether the loss, the gradients or the weights differ first, which
    tensors differ there, and which of those lie elsewhere in the buckets of the two runs.

    Exit codes: 0 the runs recorded the same things for the same steps, and all are equal; 1 they differ; 2 they
    cannot be compared (the reason is on stderr), or nothing differs of what both recorded, but one has more.

    Example: graphpasses compare eager.jsonl compiled.jsonl

    Args:
        run_a: The first run, e.g. eager's.
        run_b: The second run.
        allow: What the runs may have recorded differently and still be equal: other torch versions, seeds, models
            or numbers of ranks; steps, tensors, losses or gradients that only one has.
        json: Print one JSON object instead of tables, with every tensor.
        max_tensors: How many names each table shows at most.
    """
    from graphpasses.parity.compare import compare_runs
    from graphpasses.parity.run_file import read_run

    if max_tensors < 0:
        raise CompareError(f"--max-tensors is {max_tensors}; it cannot be negative")
    comparison = compare_runs(read_run(run_a), read_run(run_b), allow=allow)
    from graphpasses.parity.report import comparison_to_json, render_comparison
    from graphpasses.terminal import make_console

    if json:
        print(jsonlib.dumps(comparison_to_json(comparison), indent=2))
    else:
        make_console().print(render_comparison(comparison, max_tensors=max_tensors))
    return EXIT_OF[comparison.verdict]
