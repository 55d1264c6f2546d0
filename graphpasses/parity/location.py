"""Where two recorded runs part: the first operator of the first step that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphpasses._torch.recorded_operator import Operator, Value
from graphpasses.errors import CompareError
from graphpasses.parity.compare import Comparison, compare_runs
from graphpasses.parity.first_difference import Difference, first_difference, first_of_ranks
from graphpasses.parity.operators import read_operators, recorded_steps
from graphpasses.parity.run_file import Run


@dataclass(frozen=True)
class Location:
    """Where two runs part.

    Args:
        difference: the first, of all ranks; None if the runs are equal.
        by_rank: the first of each rank that has one.
        culprit: the pass, and the part of the graph, that caused it, for people; empty if it is not known.
        pass_name: name of that pass; "capture" if it is in the graph before all passes; empty if it is not known.
        script: a script that reproduces it, if one was written.
    """

    difference: Difference | None
    by_rank: Sequence[Difference] = ()
    culprit: str = ""
    pass_name: str = ""
    script: Path | None = None


def locate_runs(a: Run, b: Run) -> Location:
    """Finds the first operator at which two recorded runs part.

    Args:
        a: the first run, e.g. eager's.
        b: the second run; both recorded the operators of the first step that differs, which is also the one at which
            recording met replicas that differ.

    Raises:
        CompareError: the runs cannot be compared, see :func:`compare_runs`, have other numbers of ranks, or recorded
            no operators of that step.
        RunFileError: a file of operators is damaged.

    Example:
        >>> import tempfile
        >>> from graphpasses.parity import ParityRecorder, read_run
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> with ParityRecorder(path) as recorder:
        ...     recorder.record(0, 1.0, torch.nn.Linear(2, 2))
        >>> print(locate_runs(read_run(path), read_run(path)).difference)
        None
    """
    step = _first_step(a, b)
    if step is None:
        return Location(None)
    if a.header.world_size != b.header.world_size:
        raise CompareError(
            f"the runs have {a.header.world_size} and {b.header.world_size} ranks: operators are compared rank by "
            "rank; record both with one number of ranks"
        )
    for name, run in (("A", a), ("B", b)):
        if step not in (steps := recorded_steps(run.path)):
            has = f"it has those of {', '.join(map(str, steps))}" if steps else "it has none"
            raise CompareError(
                f"the runs part in step {step}, of which run {name} recorded no operators ({has}): record both "
                f"again with ParityRecorder(..., operators=[{step}]) and the step in recorder.operators(...)"
            )
    by_rank = (
        first_difference(*(read_operators(run.path, rank, step) for run in (a, b)))
        for rank in range(a.header.world_size)
    )
    found = [each for each in by_rank if each is not None]
    if not found:
        raise CompareError(
            f"the runs part in step {step}, but all operators that they recorded of it are equal: something differs "
            "that recorder.operators() did not enclose, e.g. the optimizer"
        )
    return Location(first_of_ranks(found), tuple(found))


def _first_step(a: Run, b: Run) -> int | None:
    """Returns the first step that differs, or that a run ended in after it recorded its operators; or None."""
    common = {each.step for each in a.steps} & {each.step for each in b.steps}
    unrecorded = sorted((set(recorded_steps(a.path)) & set(recorded_steps(b.path))) - common)
    if common or not unrecorded:
        comparison = compare_runs(a, b)
        if comparison.divergence is not None:
            return comparison.divergence.step
        if comparison.verdict == "not compared" and not unrecorded:
            raise CompareError(f"the runs cannot be compared: {comparison.gaps[0].text}")
    return next(iter(unrecorded), None)


def how_to_locate(comparison: Comparison) -> str:
    """Says how to find the operator at which two runs part; empty if they do not."""
    if comparison.divergence is None:
        return ""
    step = comparison.divergence.step
    is_recorded = all(step in recorded_steps(run.path) for run in (comparison.a, comparison.b))
    again = "" if is_recorded else f", record both again with ParityRecorder(..., operators=[{step}]), then"
    return (
        f"To find the operator at which they part{again}: graphpasses locate {comparison.a.path} {comparison.b.path}"
    )


def render_location(location: Location) -> str:
    difference = location.difference
    if difference is None:
        return "equal: nothing differs"
    lines = [str(difference)]
    for name, operator in (("A", difference.a), ("B", difference.b)):
        if operator is not None:
            lines += [f"  {name}: {operator}", f"     reads {_texts(operator.inputs)}"]
            lines += [f"     makes {_texts(operator.outputs)}"]
    if len(location.by_rank) > 1:
        lines += ["on each rank first:", *(f"  {each}" for each in location.by_rank)]
    if location.culprit:
        lines.append(location.culprit)
    if location.script is not None:
        lines.append(f"to reproduce it: python {location.script}")
    return "\n".join(lines)


def _texts(values: Sequence[Value]) -> str:
    return ", ".join(f"{v.name} {v.kind} {(v.digest or 'never written')[:8]}" for v in values) or "nothing"


def location_to_json(location: Location) -> dict[str, Any]:
    difference = location.difference
    return {
        "equal": difference is None,
        "difference": None if difference is None else _difference_to_json(difference),
        "ranks": [_difference_to_json(each) for each in location.by_rank],
        "pass": location.pass_name,
        "culprit": location.culprit,
        "script": None if location.script is None else str(location.script),
    }


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    operators = {name: _operator_to_json(getattr(difference, name)) for name in ("a", "b")}
    return {"text": str(difference), **vars(difference), **operators}


def _operator_to_json(operator: Operator | None) -> dict[str, Any] | None:
    if operator is None:
        return None
    data = asdict(operator)
    for value in (*data["inputs"], *data["outputs"]):
        del value["memory"]  # another one in each run
    return {**data.pop("where"), **data}
