"""Command line: ``python -m experiments.graph_trainer_configs --help``."""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import tyro

from experiments.graph_trainer_configs.page import make_page
from experiments.graph_trainer_configs.train import Failure, Side, train
from experiments.graph_trainer_configs.upstream import Configuration, configurations
from experiments.graph_trainer_parity.ranks import stores
from experiments.harness.outcome import Outcome, Outcomes
from experiments.harness.select import Only, select
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.commands.train_torchtitan_on_cpu import make_assets, use_cpu
from graphpasses.errors import CompareError, RunFileError
from graphpasses.parity import compare_runs, read_run
from graphpasses.parity.launch import RankError, run_ranks

USUAL_TORCH = (2, 13)  # whose outcomes do not name it
PRELOAD = ("experiments.graph_trainer_configs.preload",)


def main(
    out: Path = Path("out/graph_trainer_configs.jsonl"),
    write: Path | None = None,
    only: Only = "",
    steps: int = 3,
    timeout: float = 600.0,
    again: bool = False,
) -> int:
    """Trains every configuration of graph_trainer's own tests with our pipeline, and compares it with eager.

    Exit code 1 if one has other bits than eager, or fails where graph_trainer's own pipeline does not; 2 for wrong
    arguments.

    Args:
        out: file of the outcomes, a line each; what stands there is not tried again.
        write: page to write the table of all outcomes to, as Markdown.
        only: try only the configurations whose name contains this.
        steps: optimizer steps of each.
        timeout: seconds that a trainer may take.
        again: try again what has no bits yet, as with another torch, which the outcome then names.
    """
    use_cpu()  # before torchtitan is imported, whose tests are read
    known = configurations()
    selected = select(tuple(known), only)
    if not selected:
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(out)
    for index, each in enumerate(selected, start=1):
        before = outcomes.read().get(each.name)
        if before is not None and not (again and before.kind != "bits"):
            continue
        outcome = _try(each, steps, timeout)
        if RELEASE != USUAL_TORCH:
            parts = f"torch {torch.__version__.split('+')[0]}", outcome.detail
            outcome = replace(outcome, detail=": ".join(filter(None, parts)))
        outcomes.add(each.name, outcome)
        print(f"[{index}/{len(selected)}] {each.name}: {outcome}", flush=True)
    found = outcomes.read()
    if write is not None:
        write.write_text(make_page({each: found.get(each.name, Outcome("not run")) for each in known}))
    bad = [each.name for each in selected if found[each.name].is_bad]
    print(*bad, f"{len(bad)} of {len(selected)} configurations differ, or fail without a refusal", sep="\n")
    return int(bool(bad))


def _failure(
    configuration: Configuration, side: Side, num_steps: int, scratch: Path, timeout: float
) -> Failure | None:
    """Trains one side; returns why it could not."""
    path = scratch / f"{side}.jsonl"
    try:
        with stores(1) as ports:
            arguments = (configuration, side, num_steps, path, scratch, ports)
            ranks = run_ranks(train, configuration.num_ranks, *arguments, preload=PRELOAD, timeout=timeout)
    except RankError as error:
        return "failed", str(error).strip().splitlines()[-1]
    found = [failure for failure in ranks if failure is not None]
    # Where one rank fails, others see that it is gone.
    return min(found, key=lambda failure: "closed by peer" in failure[1], default=None)


def _try(configuration: Configuration, num_steps: int, timeout: float) -> Outcome:
    if configuration.is_compiled:
        return Outcome("rounding")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        make_assets(scratch)

        def run(side: Side) -> Failure | None:
            failure = _failure(configuration, side, num_steps, scratch, timeout)
            if failure and "connectFullMesh" in failure[1]:  # gloo on a busy machine, now and then
                failure = _failure(configuration, side, num_steps, scratch, timeout)
            return failure

        if failure := run("ours"):
            kind, message = failure
            if kind == "refused":
                return Outcome("refused", message)
            if not (theirs := run("graph_trainer")):
                return Outcome("fails", message)
            if failure := run("eager"):
                return Outcome("eager cannot", failure[1])
            return Outcome("upstream cannot", theirs[1])
        if failure := run("eager"):
            return Outcome("eager cannot", failure[1])
        try:
            eager, ours = (read_run(scratch / f"{side}.jsonl") for side in ("eager", "ours"))
            found = compare_runs(eager, ours)
        except (CompareError, RunFileError) as error:
            return Outcome("fails", str(error))
        if found.verdict != "equal":
            return Outcome("differs", str(found).splitlines()[0])
        moves = [one.weights != other.weights for one, other in itertools.pairwise(eager.steps)]
        return Outcome("bits") if len(moves) == num_steps - 1 and all(moves) else Outcome("no control")


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
