"""Trains a program eagerly twice, on another batch, captured, rewritten and compiled, and compares all bits."""

from __future__ import annotations

import re
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import graphpasses as gp
from experiments.harness.outcome import Outcome, Outcomes
from experiments.random_programs.loop import Loop
from experiments.random_programs.program import Program
from experiments.random_programs.recorder import OURS, Recorder, Way

_WORST = ("fails", "differs", "eager cannot", "refused", "rounding", "bits", "no control")
_NO_LINE = re.compile(r"def |return|record|step\(|out = model|opt = |Model\(\)|super|import")
_MADE = re.compile(r"(\s*)(?:with.*: )?(h\d*)\b.* = ")


def judge(seed: int, folder: Path, outcomes: Outcomes, make: type[Program | Loop] = Program) -> None:
    """Judges a program in this process, of one rank or of several, and prints it shrunk where it is wrong."""
    warnings.simplefilter("ignore")
    program = make(seed)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    path = folder / (f"program_{seed}.py" if is_first else f"program_{seed}_of_{dist.get_rank()}.py")
    path.write_text(program.source())
    if error := repair(path):
        if is_first:
            outcomes.add(str(seed), Outcome("eager cannot", error))
        return
    ways = OURS if program.is_compiled and not dist.is_initialized() else OURS[:2]
    if program.breaks:
        ways = ("compiled",)
    for way, outcome in judged(path, ways).items():
        if is_first:
            outcomes.add(f"{seed} {way}", outcome)
        if outcome.kind in ("differs", "fails"):
            lines = shrunk(path, way, outcome.kind)  # by all ranks together
            if is_first:
                print("\n".join(lines), flush=True)


def trained(path: Path, way: Way) -> tuple[Recorder, str]:
    """Runs a program of a file; returns what it noted, and an error."""
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    recorder, program = Recorder(way, path.parent / "checkpoint"), ModuleType("program")
    try:
        with warnings.catch_warnings(record=True) as caught, recorder.switches_noted():
            warnings.simplefilter("always")
            exec(compile(path.read_text(), str(path), "exec"), vars(program))
            program.run(recorder)
        recorder.warnings += [str(each.message) for each in caught if "graphpasses" in each.filename]
    except gp.GraphPassesError as error:
        recorder.refusals.append(str(error))
    except Exception:
        return recorder, traceback.format_exc()
    return recorder, ""


def repair(path: Path) -> str:
    """Takes lines at which eager fails out of a program; returns the error that stays, if one does."""
    for _ in range(30):
        _, error = trained(path, "eager")
        if not error:
            return ""
        lines = path.read_text().splitlines()
        start = max(_comments(lines))
        places = [int(each) - 1 for each in re.findall(rf'"{re.escape(str(path))}", line (\d+)', error)]
        places = [each for each in places if each > start and not _NO_LINE.search(lines[each])]
        of_forward = [each for each, line in enumerate(lines) if _MADE.match(line) and "F.linear" not in line]
        places = places or [each for each in of_forward if each > start]
        if not places:
            break
        made = _MADE.match(lines[places[-1]])
        kept = [] if made is None or made[2] == "h" else [f"{made[1]}{made[2]} = h + 0"]
        new = without(lines, places[-1], kept)
        path.write_text("\n".join(new) + "\n")
        if new == lines:
            break
    return error


def _comments(lines: list[str]) -> list[int]:
    """Returns where what a seed decides begins, and what may go of it."""
    return [index for index, line in enumerate(lines) if line.lstrip().startswith("# ")] or [0]


def without(lines: list[str], index: int, instead: list[str]) -> list[str]:
    """Returns lines without one, what is indented under it, and the line of a block that is empty then."""
    depth = [*(len(line) - len(line.lstrip()) for line in lines), 0]
    end = index + 1
    while depth[end] > depth[index]:
        end += 1
    new = [*lines[:index], *instead, *lines[end:]]
    is_empty = not instead and depth[index - 1] < depth[index] > depth[end]
    return without(new, index - 1, []) if is_empty else new


def judged(path: Path, ways: tuple[Way, ...] = OURS) -> dict[Way, Outcome]:
    """Returns what came of a program in each way."""
    (eager, error), (again, _), (control, _) = (trained(path, way) for way in ("eager", "again", "control"))
    losses = [[value for value in run.values if value[0] == "loss"] for run in (eager, control)]
    if error or eager.values != again.values:
        found = Outcome("eager cannot", error or "eager does not repeat its bits")
    else:
        found = Outcome("no control" if losses[0] == losses[1] else "bits")
    found = _of_all_ranks(found)
    if found.kind != "bits":
        return dict.fromkeys(ways, found)
    return {way: _of_all_ranks(_compared(eager, *trained(path, way))) for way in ways}


def _of_all_ranks(outcome: Outcome) -> Outcome:
    """Returns the worst outcome of all ranks, so that all go on alike; that of this one where there are no others."""
    if not dist.is_initialized():
        return outcome
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return min(outcomes, key=lambda each: _WORST.index(each.kind))


def _compared(eager: Recorder, ours: Recorder, error: str) -> Outcome:
    for theirs, our in zip(eager.values, ours.values, strict=False):
        if theirs != our:
            if ours.warnings:
                return Outcome("rounding", "; ".join(ours.warnings))
            return Outcome("differs", f"{theirs[0]}: {theirs[1]}, then {our[1]}")
    if error:
        return Outcome("fails", error)
    return Outcome("refused", "; ".join(ours.refusals)) if ours.refusals else Outcome("bits")


def shrunk(path: Path, way: Way, kind: str) -> list[str]:
    """Takes out of a program, in its file, what its outcome does not need; returns its lines."""
    lines = path.read_text().splitlines()
    for index in reversed(range(min(_comments(lines)) + 1, len(lines))):
        if index >= len(lines):
            continue
        new = without(lines, index, [])
        path.write_text("\n".join(new) + "\n")
        lines = new if judged(path, (way,))[way].kind == kind else lines
    path.write_text("\n".join(lines) + "\n")
    return lines
