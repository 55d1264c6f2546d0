"""Command line: ``python -m experiments.scale_parity --help``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import tyro

from experiments.harness.parity import ParityExperiment
from experiments.harness.select import Only, select
from experiments.harness.simulated import SimulatedRun, play_all
from experiments.harness.verdict import Verdict, judge, run_path
from experiments.scale_parity.cases import EAGER, GRAPH, Case, cases
from experiments.scale_parity.train import train
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
    only: Only = "",
    workers: int = os.cpu_count() or 1,
    chosen_protocols: bool = False,
) -> int:
    """Trains two language models on simulated clusters: with eager FSDP2, and as graphs packed in several orders.

    Every rank is real, and reductions add in bf16 in the order of NCCL's rings. The graph in eager's order must have
    eager's bits after every step, those in other orders must not. Runs that are complete in OUT are not played again.
    Exit code 0 if all is as it must be, 1 if not, 2 for wrong arguments.

    Args:
        ranks: sizes of the clusters.
        gpus_per_node: GPUs of each node.
        steps: optimizer steps of eager and of the graph in eager's order.
        control_steps: of those in other orders, which differ from eager at once.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: play only the cases whose name contains this, e.g. "gpt, 64".
        workers: processes, each of which plays a run at a time.
        chosen_protocols: with the protocol that NCCL would choose for each reduction, by its cost model on assumed
            hardware, in place of Simple for all. A control that has eager's bits then is named as wrong in the table.
    """
    try:
        protocol: Literal["simple", "auto"] = "auto" if chosen_protocols else "simple"
        selected = select([case for num in ranks for case in cases(num, gpus_per_node, protocol)], only)
        for case in selected:
            Topology(**case.topology)
    except GraphPassesError as error:
        print(error, file=sys.stderr)
        return 2
    if not selected:
        return 2

    def run_of(case: Case, variant: str) -> SimulatedRun[Case]:
        num_steps = steps if variant in (EAGER, GRAPH) else control_steps
        return SimulatedRun(case, variant, num_steps, run_path(out, case.name, variant))

    runs = [run_of(case, variant) for case in selected for variant in case.variants]
    complete = {run.path for run in runs if run.is_done()}
    title, columns = "Graphs against eager FSDP2 on simulated clusters", ("predicted from the layouts",)
    experiment = ParityExperiment(title, selected, steps, out, columns, keep=complete)
    experiment.console.print(f"{len(complete)} of {len(runs)} runs are complete in {out}; {workers} processes")
    experiment.counter.num_done = len(complete)
    play_all([run for run in runs if run.path not in complete], train, workers, experiment.counter)
    verdicts = []
    for case in selected:
        for row in case.comparisons:
            verdict = judge(case.name, row, out, run_of(case, row.variant).num_steps)
            verdicts.append(_with_prediction(verdict, case, out))
    for case in selected:
        experiment.console.print(f"report: {_write_report(case, out)}")
    return experiment.conclude(verdicts)


def _with_prediction(verdict: Verdict, case: Case, out: Path) -> Verdict:
    """Adds what the layouts predict; a row whose gradients differ elsewhere is wrong."""
    if verdict.status == "not compared":
        return replace(verdict, cells=("",))
    eager, other = (read_run(run_path(out, case.name, name)) for name in (EAGER, verdict.variant))
    predicted, is_so = _predict(eager, other, Topology(**case.topology))
    return replace(verdict, status=verdict.status if is_so else "wrong", cells=(predicted,))


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
