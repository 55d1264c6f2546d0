"""What becomes of a type of model: its graph has eager's bits, or is refused, or eager cannot train it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from experiments.architectures.cases import EAGER, EAGER_ITSELF, GRAPH, Case
from experiments.architectures.registry.types import Registered
from experiments.architectures.train import train
from experiments.harness.simulated import SimulatedRun
from experiments.harness.verdict import Comparison, judge, run_path

__all__ = ["Found", "Outcome", "find", "read", "table", "write"]

Found = Literal["equal", "refused", "eager cannot", "different", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What was seen of a type.

    Args:
        name: of the type.
        dtype: of the reductions.
        found: which of the outcomes it is; "failed" if the graph ended in an error that is no refusal.
        reason: how the error, or the difference, begins; empty if there is none.
    """

    name: str
    dtype: str
    found: Found
    reason: str = ""


def find(architecture: Registered, num_steps: int, folder: Path) -> list[Outcome]:
    """Trains a type eagerly and as a graph, with reductions in bf16 and in fp32, and compares every bit."""
    return [_find(Case(architecture, dtype), num_steps, folder) for dtype in (torch.bfloat16, torch.float32)]


def _find(case: Case, num_steps: int, folder: Path) -> Outcome:
    dtype = case.name.rpartition(", ")[2]

    def outcome(found: Found, reason: str = "") -> Outcome:
        return Outcome(case.architecture.name, dtype, found, _first_sentence(reason))

    for variant in (EAGER, GRAPH):
        path = run_path(folder, case.name, variant)
        path.parent.mkdir(parents=True, exist_ok=True)
        ended = train(SimulatedRun(case, variant, num_steps, path), lambda _: None)
        if ended.facts:
            refused = str(ended.facts)
            is_eagers = refused.startswith(EAGER_ITSELF)
            return outcome("eager cannot" if is_eagers else "refused", refused.removeprefix(EAGER_ITSELF))
        if ended.failure:
            return outcome("failed", ended.failure)
    verdict = judge(case.name, Comparison(GRAPH, EAGER, "equal"), folder, num_steps)
    return outcome("equal") if verdict.status == "ok" else outcome("different", verdict.result)


def _first_sentence(text: str) -> str:
    """Returns the beginning of an error, without folders.

    Example:
        >>> _first_sentence("CaptureError: loss_fn decides by a value at /lib/model.py:9 in forward; call x. Or not.")
        'CaptureError: loss_fn decides by a value at model.py:9 in forward'
    """
    return re.sub(r"/\S*/(\w+\.py)", r"\1", re.split(r"[;\n]|\. |\.$", text)[0])


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Appends outcomes to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(each)) + "\n" for each in outcomes)


def read(path: Path) -> list[Outcome]:
    """Returns the outcomes of a file; none if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns a table of what was found, and lists of the types that have not eager's bits, by reason."""
    kinds = get_args(Found)
    counts = Counter((each.found, each.dtype) for each in outcomes)
    dtypes = sorted({each.dtype for each in outcomes})
    lines = [f"| | {' | '.join(dtypes)} |", f"|---|{'---|' * len(dtypes)}"]
    lines += [f"| {kind} | {' | '.join(str(counts[kind, dtype]) for dtype in dtypes)} |" for kind in kinds]
    lines += ["", "| found | types | reason |", "|---|---|---|"]
    names: dict[tuple[str, str], list[str]] = {}
    for each in outcomes:
        if each.found != "equal":
            types = names.setdefault((each.found, each.reason), [])
            types += [each.name] * (each.name not in types)
    lines += [f"| {kind} | {', '.join(types)} | `{reason}` |" for (kind, reason), types in sorted(names.items())]
    return "\n".join(lines)
