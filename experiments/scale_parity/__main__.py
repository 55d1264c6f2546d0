"""Command line: ``python -m experiments.scale_parity --help``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments._parity.select import select
from experiments._parity.verdict import Must, Verdict, compare, run_path, verdict_table
from experiments.scale_parity.cases import EAGER, GRAPH, Case, cases
from experiments.scale_parity.runs import PlayedRun, play_all
from graphpasses.errors import GraphPassesError
from graphpasses.html_report import ShownRun, render_page
from graphpasses.parity import Run, compare_runs, read_run
from graphpasses.simulate import Topology, predict


def main(
    ranks: tuple[int, ...] = (64,),
    gpus_per_node: int = 8,
    steps: int = 25,
    control_steps: int = 5,
    out: Path = Path("runs/scale_parity"),
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
    workers: int = os.cpu_count() or 1,
) -> int:
    """Trains two language models on simulated clusters: with eager FSDP2, and as graphs packed in several orders.

    Every rank is real, and reductions add in bf16 in the order of NCCL's rings. The graph in eager's order must have
    eager's bits after every step, those in other orders must not. Runs that are complete in OUT are not played again.
    Exit code 0 if all is as it must be, 1 if not, 2 for wrong arguments.

    Args:
        ranks: sizes of the clusters.
        gpus_per_node: GPUs of each node.
        steps: optimizer steps of eager and of the graph in eager's order.
        control_steps: of those in other orders, which part from eager at once.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: play only the cases whose name contains this, e.g. "gpt, 64".
        workers: processes, each of which plays a run at a time.
    """
    try:
        selected = select([case for num in ranks for case in cases(num, gpus_per_node)], only)
        for case in selected:
            Topology(**case.topology)
    except GraphPassesError as error:
        print(error, file=sys.stderr)
        return 2
    if not selected:
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    runs = [
        PlayedRun(
            case,
            variant,
            steps if variant in (EAGER, GRAPH) else control_steps,
            run_path(out, case.name, variant),
        )
        for case in selected
        for variant in case.variants
    ]
    waiting = [run for run in runs if not run.is_done()]
    console.print(
        f"{len(runs)} runs, {len(runs) - len(waiting)} of them complete in {out}; {workers} processes"
    )
    start = time.monotonic()
    play_all(waiting, workers, console)
    verdicts = [_verdict(run, run_path(out, run.case.name, EAGER)) for run in runs if run.variant != EAGER]
    title = "Graphs against eager FSDP2 on simulated clusters"
    console.print(verdict_table(title, verdicts, "predicted from the layouts"))
    for case in selected:
        console.print(f"report: {_write_report(case, out)}")
    num_wrong = sum(not verdict.right for verdict in verdicts)
    console.print(f"{num_wrong} of {len(verdicts)} rows are wrong; {time.monotonic() - start:.0f} s")
    return 1 if num_wrong else 0


def _verdict(run: PlayedRun, eager: Path) -> Verdict:
    must: Must = "equal" if run.variant == GRAPH else "differ"
    result, right = compare(eager, run.path, run.num_steps, must)
    predicted, is_so = _predict(read_run(eager), read_run(run.path), Topology(**run.case.topology))
    return Verdict(run.case.name, run.variant, must, result, right and is_so, (predicted,))


def _predict(eager: Run, other: Run, topology: Topology) -> tuple[str, bool]:
    """Says which gradients may differ by their places alone, and whether no other one does in the first step."""
    assert eager.header.layouts is not None
    assert other.header.layouts is not None
    prediction = predict(eager.header.layouts, other.header.layouts, topology)
    divergence = compare_runs(eager, other).divergence
    differing = set(divergence.gradients or ()) if divergence is not None else set()
    is_so = differing <= {each.fqn for each in prediction.reordered}
    num = len(prediction.reordered)
    return (f"{num} may differ, {len(differing)} do" if num else "none can differ"), is_so


def _write_report(case: Case, out: Path) -> Path:
    """Draws all runs of a case as one page, eager's first."""
    paths = [run_path(out, case.name, variant) for variant in case.variants]
    page = paths[0].with_name("report.html")
    page.write_bytes(render_page([ShownRun(read_run(path), Topology(**case.topology)) for path in paths]))
    return page


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
