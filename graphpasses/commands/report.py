"""``graphpasses report``: recorded runs as a page to look at."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions, known_fields
from graphpasses.commands.exit_codes import EXIT_OK
from graphpasses.errors import RunFileError, TopologyError

if TYPE_CHECKING:
    from graphpasses.html_report import ShownRun
    from graphpasses.parity.run_file import Run


def report(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN …]")] = (),
    /,
    *,
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    out: Path = Path("report.html"),
    speeds: Path | None = None,
    json: bool = False,
) -> int:
    """Draw recorded runs as one page of HTML, which needs no network and no other file.

    The first run is what the others are compared with, e.g. eager's. The page shows which steps are equal, explains
    the first difference, draws every bucket of both runs with the rings that add it and what moved, what each pass
    did to the graph, and how long the step's collectives would take on 8 to 100,000 ranks, on paper. A run that was
    cut short is shown as far as it goes.

    Exit codes: 0 the page is written, 2 it is not (the reason is on stderr).

    Example: graphpasses report eager.jsonl compiled.jsonl --out report.html

    Args:
        runs: Run files, the reference first.
        cluster: The cluster; what is given here replaces what the runs recorded.
        out: File to write; replaced if it exists.
        speeds: File of TOML with the latencies and bandwidths of links; what it leaves out is assumed.
        json: Print one JSON object instead of a sentence.
    """
    from graphpasses.html_report import render_page
    from graphpasses.parity.run_file import read_run
    from graphpasses.scale import read_speeds

    if not runs:
        raise RunFileError("no run was given: graphpasses report RUN…, the reference first")
    if out.resolve() in {path.resolve() for path in runs}:
        raise RunFileError(f"--out is '{out}', which is one of the runs; name another file")
    known = None if speeds is None else read_speeds(speeds)
    page = render_page([_shown(read_run(path), cluster) for path in runs], known)
    try:
        out.write_bytes(page)
    except OSError as error:
        raise RunFileError(f"cannot write '{out}': {error.strerror}") from None
    if json:
        print(jsonlib.dumps({"out": str(out), "runs": [str(path) for path in runs], "num_bytes": len(page)}))
    else:
        print(f"wrote {out}")
    return EXIT_OK


def _shown(run: Run, cluster: ClusterOptions) -> ShownRun:
    from graphpasses.html_report import ShownRun

    header = run.header
    if cluster.ranks not in (None, header.world_size):
        raise TopologyError(f"'{run.path}' has {header.world_size} ranks, --ranks says {cluster.ranks}")
    try:
        topology = cluster.topology(header.topology, header.world_size)
    except TopologyError as error:
        raise TopologyError(f"the cluster of '{run.path}': {error}") from None
    is_assumed = cluster == DEFAULT_CLUSTER and not known_fields(header.topology, header.world_size)
    return ShownRun(run, topology, is_assumed)
