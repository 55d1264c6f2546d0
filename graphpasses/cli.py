"""The command line: ``graphpasses SUBCOMMAND``; each subcommand is one function that returns an exit code."""

from __future__ import annotations

import json as jsonlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg
from tyro.extras import SubcommandApp

from graphpasses.errors import CompareError, GraphPassesError

__all__ = ["main"]

# Exit codes, as diff and cmp have them.
EXIT_EQUAL, EXIT_DIFFERENT, EXIT_TROUBLE = 0, 1, 2

app = SubcommandApp()


@app.command
def compare(
    run_a: Annotated[Path, Positional, arg(metavar="RUN_A")],
    run_b: Annotated[Path, Positional, arg(metavar="RUN_B")],
    /,
    *,
    json: bool = False,
    max_tensors: int = 20,
) -> int:
    """Compare two recorded runs, step by step and tensor by tensor.

    Tells the first step in which they differ, whether the loss, the gradients or the weights parted first, which
    tensors differ there, and which of those lie elsewhere in the buckets of the two runs.

    Exit codes: 0 the runs are equal, 1 they differ, 2 they cannot be compared (the reason is on stderr).

    Example: graphpasses compare eager.jsonl compiled.jsonl

    Args:
        run_a: The first run, e.g. eager's.
        run_b: The second run.
        json: Print one JSON object instead of tables, with every tensor.
        max_tensors: How many names each table shows at most.
    """
    from graphpasses.parity.compare import compare_runs
    from graphpasses.parity.run_file import read_run

    if max_tensors < 0:
        raise CompareError(f"--max-tensors is {max_tensors}; it cannot be negative")
    comparison = compare_runs(read_run(run_a), read_run(run_b))
    from graphpasses.parity.report import comparison_to_json, make_console, render_comparison

    if json:
        print(jsonlib.dumps(comparison_to_json(comparison), indent=2))
    else:
        make_console().print(render_comparison(comparison, max_tensors=max_tensors))
    return EXIT_EQUAL if comparison.equal else EXIT_DIFFERENT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name (default: ``sys.argv[1:]``).

    Returns:
        The exit code: what the subcommand says, or 2 for wrong usage and for any error of graphpasses.

    Example:
        >>> main(["compare", "missing.jsonl", "missing.jsonl"])  # the reason goes to stderr
        2
    """
    try:
        code = app.cli(
            prog="graphpasses",
            description="Checks of distributed training graphs against eager.",
            args=sys.argv[1:] if argv is None else list(argv),
            config=(FlagCreatePairsOff,),
        )
    except GraphPassesError as error:
        print(f"graphpasses: {error}", file=sys.stderr)
        return EXIT_TROUBLE
    except SystemExit as exit_request:  # tyro's, after --help (0) or wrong usage (2)
        return int(exit_request.code or 0)
    except Exception:  # Python would exit with 1, which says "different"
        traceback.print_exc()
        return EXIT_TROUBLE
    assert isinstance(code, int)
    return code
