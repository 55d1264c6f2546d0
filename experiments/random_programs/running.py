"""Trains a program eagerly twice, on another batch, captured, rewritten and compiled, and compares all bits."""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import graphpasses as gp
from experiments.harness.outcome import Outcome, Outcomes
from experiments.random_programs.program import Program

Way = Literal["eager", "again", "control", "captured", "pipeline", "compiled"]
OURS: tuple[Way, ...] = ("captured", "pipeline", "compiled")
_WORST = ("fails", "differs", "eager cannot", "refused", "rounding", "bits", "no control")
_NO_LINE = re.compile(r"def |return|record|step\(|out = model|opt = |Model\(\)|super|import")
_MADE = re.compile(r"(\s*)(?:with.*: )?(h\d*)\b.* = ")


class Recorder:
    """What a program is given: batches, a step, and what notes all values that a loop can observe.

    Args:
        way: how the step runs. A refused capture is followed by an eager step, a refused call by another capture: so
            that what a refusal leaves behind shows, too.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self.values: list[tuple[str, str]] = []
        self.refusals: list[str] = []
        self.warnings: list[str] = []  # of graphpasses

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def floats(self, step: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=self._generator(step))

    def integers(self, step: int) -> torch.Tensor:
        return torch.randint(8, (4,), generator=self._generator(step))

    def _generator(self, step: int) -> torch.Generator:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return torch.Generator().manual_seed(1000 * step + 10 * rank + (self._way == "control" and step == 2))

    def step(self, loss_fn: Any, model: nn.Module, optimizer: Any, *, is_inside: bool) -> Callable[..., torch.Tensor]:
        """Returns what runs a step, with its optimizer if ``is_inside``."""
        captured: list[Any] = []

        def eager(*batch: Any, run: Any = model) -> torch.Tensor:
            loss: torch.Tensor = loss_fn(run, *batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if is_inside:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        if self._way == "compiled":
            compiled = gp.compile(model, inner="aot_eager")
            return lambda *batch: eager(*batch, run=compiled)
        if self._way not in OURS:
            return eager

        def run(*batch: Any) -> torch.Tensor:
            for _ in range(2):
                try:
                    if not captured:
                        step = gp.capture_train_step(
                            loss_fn, model, *batch, optimizer=optimizer if is_inside else None
                        )
                        is_whole = self._way == "captured"
                        plan = gp.BucketPlan.from_modules([]) if self.num_ranks == 1 else None
                        captured[:] = [step if is_whole else gp.default_pipeline(plan).run(step)]
                    return captured[0](*batch)  # type: ignore[no-any-return]
                except gp.GraphPassesError as error:
                    captured.clear()
                    self.refusals.append(str(error))
            return eager(*batch)

        return run

    def log(self, name: str, *values: Any) -> None:
        self.values += [(name, text_of(value)) for value in values]

    def record(self, loss: torch.Tensor, model: nn.Module, optimizer: Any, held: list[Any], x: torch.Tensor) -> None:
        """Notes all that the loop can see after a step."""
        for name, parameter in model.named_parameters():
            self.log(name, parameter, parameter.grad, *optimizer.state.get(parameter, {}).values())
        for name, module in model.named_modules():
            kinds = torch.Tensor, int, float, type(None)
            values = {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, kinds)}
            self.log(f"module {name}", *module.buffers(recurse=False), sorted(values))
            self.log(f"attributes of {name}", *(values[key] for key in sorted(values)))
        self.log("loss", loss)
        self.log("others", x, *held, torch.get_rng_state(), hash(random.getstate()))


def judge(seed: int, folder: Path, outcomes: Outcomes) -> None:
    """Judges a program in this process, of one rank or of several, and prints it shrunk where it is wrong."""
    warnings.simplefilter("ignore")
    program = Program(seed)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    path = folder / (f"program_{seed}.py" if is_first else f"program_{seed}_of_{dist.get_rank()}.py")
    path.write_text(program.source())
    if error := repair(path):
        if is_first:
            outcomes.add(str(seed), Outcome("eager cannot", error))
        return
    # Dynamo does not guard all Python values, as the limits say.
    ways = OURS[:2] if program.values or dist.is_initialized() else OURS
    for way, outcome in judged(path, ways).items():
        if is_first:
            outcomes.add(f"{seed} {way}", outcome)
        if outcome.kind in ("differs", "fails"):
            lines = shrunk(path, way, outcome.kind)  # by all ranks together
            if is_first:
                print("\n".join(lines), flush=True)


def text_of(value: Any) -> str:
    """Returns what tells two values apart: of a tensor dtype, shape and bits."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if not callable(value) else "a function"
    if isinstance(value, DTensor):
        return f"{value.placements} {text_of(value.to_local())}"
    data = value.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{[*value.shape]} {sha256(data.numpy().tobytes()).hexdigest()[:12]}"


def trained(path: Path, way: Way) -> tuple[Recorder, str]:
    """Runs a program of a file; returns what it noted, and an error."""
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    recorder, program = Recorder(way), ModuleType("program")
    try:
        with warnings.catch_warnings(record=True) as caught:
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
        places = [int(each) - 1 for each in re.findall(rf'"{re.escape(str(path))}", line (\d+)', error)]
        places = [each for each in places if not _NO_LINE.search(lines[each])]
        places = places or [each for each, line in enumerate(lines) if _MADE.match(line) and "F.linear" not in line]
        if not places:
            break
        made = _MADE.match(lines[places[-1]])
        kept = [] if made is None or made[2] == "h" else [f"{made[1]}{made[2]} = h + 0"]
        new = without(lines, places[-1], kept)
        path.write_text("\n".join(new) + "\n")
        if new == lines:
            break
    return error


def without(lines: list[str], index: int, instead: list[str]) -> list[str]:
    """Returns lines without one and what is indented under it."""
    depth = [len(line) - len(line.lstrip()) for line in lines]
    end = index + 1
    while end < len(lines) and depth[end] > depth[index]:
        end += 1
    return [*lines[:index], *instead, *lines[end:]]


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
    for index in reversed(range(len(lines))):
        new = without(lines, index, [])
        path.write_text("\n".join(new) + "\n")
        lines = new if judged(path, (way,))[way].kind == kind else lines
    path.write_text("\n".join(lines) + "\n")
    return lines
