"""Command line: ``python -m experiments.wire_time --help``."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.table import Table

from experiments.wire_time.fit import fit
from experiments.wire_time.measure import measure
from experiments.wire_time.steps import step_of
from graphpasses.parity.launch import run_ranks
from graphpasses.scale import Speeds, Transfer, wire_seconds
from graphpasses.terminal import make_console

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LIMIT = 0.25


def main(
    ranks: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8),
    fit_ranks: tuple[int, ...] = (2, 4, 8),
    fit_kib: tuple[int, ...] = (4, 256, 2048, 16384),
    predict_kib: tuple[int, ...] = (32, 512, 1024, 4096, 8192),
    cores: int = len(os.sched_getaffinity(0)),
    rounds: int = 15,
    out: Path = Path("runs/wire_time.json"),
    again: bool = False,
) -> int:
    """Fits latency and bandwidth of gloo to some sizes and numbers of processes, and predicts the others.

    The exit code is 0 if all predictions are within 25 % of what was measured, else 1.

    Args:
        ranks: numbers of processes.
        fit_ranks: those of them that the model is fitted to.
        fit_kib: sizes that it is fitted to, of the larger of input and output of a rank.
        predict_kib: sizes that it predicts, on all numbers of processes.
        cores: of this machine, which the processes share.
        rounds: counted rounds of each measurement.
        out: file for the measured times.
        again: take the times of that file, which the same sizes have made.
    """
    console = make_console()
    steps = {num: step_of(num) for num in ranks}
    cases = {
        num: [_case(name, kib, num) for name in COLLECTIVES for kib in (*fit_kib, *predict_kib)] for num in ranks
    }
    seconds: dict[str, list[float]] = json.loads(out.read_text()) if again else {}
    for num in () if again else ranks:
        console.print(f"measuring {num} processes …")
        seconds[str(num)] = run_ranks(measure, num, cases[num], [steps[num]], rounds, timeout=3600.0)[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(seconds))
    step_seconds = {num: seconds[str(num)][-1] for num in ranks}
    measured = {case: found for num in ranks for case, found in zip(cases[num], seconds[str(num)][:-1], strict=True)}
    speeds = {}
    for name in COLLECTIVES:
        fitted = [_case(name, kib, num) for kib in fit_kib for num in fit_ranks]
        speeds[name] = fit([(case, measured[case]) for case in fitted], cores)
    console.print(_speeds_table(speeds))
    table = Table("collective", "processes", title="Predicted sizes: measured, predicted, error")
    for kib in predict_kib:
        table.add_column(f"{kib:,} KiB", justify="right")
    errors = []
    for name in COLLECTIVES:
        for num in ranks:
            cells = []
            for kib in predict_kib:
                case = _case(name, kib, num)
                predicted = wire_seconds(case, speeds[name], "ring")
                errors.append(predicted / measured[case] - 1)
                cells.append(f"{1e3 * measured[case]:.2f} {1e3 * predicted:.2f} {errors[-1]:+.0%}")
            table.add_row(name, str(num), *cells, end_section=num == ranks[-1])
    console.print(table)
    table = Table("processes", "collectives", title="All collectives of a step of FSDP2, one after the other")
    for column in ("measured, ms", "predicted, ms", "error"):
        table.add_column(column, justify="right")
    step_errors = []
    for num, step in steps.items():
        predicted = sum(wire_seconds(each, speeds[each.collective], "ring") for each in step.transfers)
        step_errors.append(predicted / step_seconds[num] - 1)
        numbers = (f"{1e3 * step_seconds[num]:.1f}", f"{1e3 * predicted:.1f}", f"{step_errors[-1]:+.0%}")
        table.add_row(str(num), str(len(step.transfers)), *numbers)
    console.print(table)
    for what, found in (("sizes", errors), ("steps", step_errors)):
        console.print(f"{what}: {_verdict(found)}")
    return int(any(abs(error) > LIMIT for error in (*errors, *step_errors)))


def _case(name: str, kib: int, num_ranks: int) -> Transfer:
    numel = 256 * kib // num_ranks * num_ranks
    return Transfer(name, 4 * numel, num_ranks, 1)


def _verdict(errors: Sequence[float]) -> str:
    within = sum(abs(error) <= LIMIT for error in errors)
    median = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    return f"{within} of {len(errors)} within {LIMIT:.0%}; median error {median:.0%}, worst {worst:+.0%}"


def _speeds_table(speeds: dict[str, Speeds]) -> Table:
    table = Table("collective", title="Fitted")
    for column in ("launch, µs", "hop, µs", "GB/s"):
        table.add_column(column, justify="right")
    for name, each in speeds.items():
        table.add_row(name, f"{each.launch_latency:.0f}", f"{each.intra_latency:.0f}", f"{each.intra_bandwidth:.2f}")
    return table


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
