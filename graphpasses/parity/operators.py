"""The operators of one step as JSON lines, one file for each rank: what each read and made, as hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from graphpasses._torch.recorded_operator import Operator, Value, Where
from graphpasses.errors import RunFileError
from graphpasses.parity.run_file import json_line

FORMAT_VERSION = 4
_FORMAT = "graphpasses-operators"


@dataclass(frozen=True)
class OperatorStep:
    """The operators of one step on one rank."""

    rank: int
    step: int
    start: tuple[Value, ...]  # what the step began with
    operators: Sequence[Operator]  # in the order in which they ran
    end: tuple[Value, ...]  # what it ended with: gradients, weights, buffers, its loss if that was recorded


def operator_file(path: str | os.PathLike[str], rank: int) -> Path:
    """Returns where a rank's operators lie beside a run file."""
    return Path(f"{os.fspath(path)}.operators") / f"rank-{rank}.jsonl"


def header_line(torch: str, rank: int, world_size: int) -> bytes:
    return json_line(
        {"format": _FORMAT, "version": FORMAT_VERSION, "torch": torch, "rank": rank, "world_size": world_size}
    )


def operator_line(data: Operator | dict[str, Any]) -> bytes:
    """Returns the line of an operator; or what begins or ends a step, or says its loss, with values in it."""
    return json_line(data, default=astuple)


def read_operators(path: str | os.PathLike[str], rank: int, step: int) -> OperatorStep:
    """Reads the operators of one step of one rank, beside a run file; raises where they are not all there."""
    file = operator_file(path, rank)
    start: tuple[Value, ...] | None = None
    end: tuple[Value, ...] | None = None
    operators: list[Operator] = []
    for number, data in _lines(file):
        try:
            if end is not None:
                end += _values(data["values"]) if isinstance(data, dict) and data.get("loss") == step else ()
                break
            if isinstance(data, dict) and data.get("step") == step:
                start = _values(data["start"])
            elif start is not None and isinstance(data, list):
                operators.append(_operator(data))
                if operators[-1].position != len(operators) - 1:
                    raise ValueError(f"operator {operators[-1].position} follows {len(operators) - 2}")
            elif start is not None and isinstance(data, dict):
                if data["end"] != step or data["num_operators"] != len(operators):
                    raise ValueError(f"step {step} has {data['num_operators']} operators, not {len(operators)}")
                end = _values(data["values"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunFileError(f"'{file}' is damaged in line {number}: {error}") from None
    if start is not None and end is not None:
        return OperatorStep(rank, step, start, operators, end)
    if start is not None:
        raise RunFileError(f"'{file}' ends in the midst of step {step}: the run was cut short")
    raise RunFileError(f"'{file}' does not hold step {step}; record the run with operators=[{step}]")


def recorded_steps(path: str | os.PathLike[str]) -> list[int]:
    """Returns the steps whose operators a run recorded; none if it recorded no operators."""
    file = operator_file(path, 0)
    if not file.exists():
        return []
    return [data["step"] for _, data in _lines(file) if isinstance(data, dict) and "step" in data]


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the lines behind the header, parsed, with their numbers; a last line that was cut is none."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise RunFileError(f"cannot read '{file}': {error.strerror}") from None
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
            except ValueError:
                raise RunFileError(f"'{file}' is damaged in line {number}: it is not JSON") from None
            if number > 1:
                yield number, data
            elif not isinstance(data, dict) or data.get("format") != _FORMAT:
                raise RunFileError(f"'{file}' holds no operators: its first line is not their header")
            elif data["version"] != FORMAT_VERSION:
                raise RunFileError(
                    f"'{file}' has format version {data['version']}, this graphpasses reads version "
                    f"{FORMAT_VERSION}: record the run again"
                )


def _values(rows: Any) -> tuple[Value, ...]:
    return tuple(Value(*row) for row in rows)


def _operator(row: list[Any]) -> Operator:
    operator, (module, line, *rest), inputs, outputs, arguments, *others = row
    where = Where(module, line and tuple(line), *rest)
    return Operator(operator, where, _values(inputs), _values(outputs), tuple(arguments), *others)
