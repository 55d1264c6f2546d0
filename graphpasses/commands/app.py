"""The command line: ``graphpasses SUBCOMMAND``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from tyro.conf import FlagCreatePairsOff
from tyro.extras import SubcommandApp

from graphpasses.commands.compare import compare
from graphpasses.commands.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_TROUBLE
from graphpasses.commands.layout import diff, drift, show
from graphpasses.commands.locate import locate
from graphpasses.commands.parity import parity
from graphpasses.commands.passes import passes
from graphpasses.commands.report import report
from graphpasses.commands.simulate import simulate
from graphpasses.errors import GraphPassesError
from graphpasses.terminal import has_no_reader

layout = SubcommandApp()
layout.command(show)
layout.command(diff)
layout.command(drift)

app = SubcommandApp()
app.command(parity)
app.command(compare)
app.command(locate)
app.command(layout, name="layout", help="Look at the bucket layouts of recorded runs, and compare them.")
app.command(simulate)
app.command(passes)
app.command(report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default with ``sys.argv[1:]``.

    Returns the exit code: what the subcommand says, or 2 for wrong usage and for any error of graphpasses, or 141 if
    what reads the output has gone, as ``head`` does, or 130 after Control-C, when all ranks have ended.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, since nothing catches what fails when Python ends
    except KeyboardInterrupt:
        print("graphpasses: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # Python would exit with 1, which says "different"
        if isinstance(error, BrokenPipeError) and has_no_reader(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not flushed yet
            return EXIT_BROKEN_PIPE
        traceback.print_exc()
        return EXIT_TROUBLE
    return code


def _run(argv: Sequence[str] | None) -> int:
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
    except OSError as error:
        if error.filename is None:
            raise
        print(f"graphpasses: cannot use '{error.filename}': {error.strerror}", file=sys.stderr)
        return EXIT_TROUBLE
    except SystemExit as exit_request:  # tyro's, after --help (0) or wrong usage (2)
        return int(exit_request.code or 0)
    assert isinstance(code, int)
    return code
