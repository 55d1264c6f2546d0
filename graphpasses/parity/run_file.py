"""Recorded runs as JSON lines: a header, one line per step, and a last line that says the run ended.

Lines between them may hold what is known only once a run has compiled: its bucket layouts, and what passes did to its
graphs. Of several such lines the last one counts.

A run that was killed keeps every line that was written whole; reading it says that it was cut. Reading a
run imports torch only if it holds bucket layouts or what passes did.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

from graphpasses.errors import RunFileError

if TYPE_CHECKING:
    from graphpasses.fsdp.layout import Layout
    from graphpasses.graph.pass_report import PipelineReport

FORMAT_VERSION = 2
GRADIENT_NORM = "(norm of all gradients)"
"""The name under which a trainer's norm is recorded, as if it were a gradient."""
_FORMAT = "graphpasses-run"
# Every run file starts with these bytes, whatever its version.
_MAGIC = b'{"format": "' + _FORMAT.encode() + b'", "version": '

_HASH = re.compile("[0-9a-f]{32}")
_BITS = re.compile("(?:[0-9a-f]{2})+")
_KINDS = {int: "a number", str: "text", dict: "an object", list: "a list"}

JSON: TypeAlias = Any


@dataclass(frozen=True)
class RunHeader:
    """What a run was."""

    torch: str  # version of torch
    world_size: int  # number of ranks
    run: str = ""  # its name
    model: str = ""  # description of the model
    seed: int | Mapping[str, int] | None = None  # seed, or named seeds
    topology: JSON = None  # the cluster, e.g. ``{"nodes": 2, "gpus_per_node": 8}``
    layouts: Layout | None = None  # bucket layouts of its reductions, if known


@dataclass(frozen=True)
class Loss:
    """The losses of one step."""

    dtype: str  # e.g. ``"float32"``
    bits: tuple[str, ...]  # raw bits of each rank's loss, hexadecimal, in rank order
    values: tuple[str, ...]  # the same for people, as ``repr`` of a float


@dataclass(frozen=True)
class StepRecord:
    """The hashes after one step."""

    step: int  # its number
    loss: Loss | None  # the losses, if the step had one
    weights: Mapping[str, str]  # hash of each parameter and buffer, by FQN
    gradients: Mapping[str, str | None]  # of each parameter's gradient, by FQN; None where there was none


@dataclass(frozen=True)
class Run:
    """A recorded run, or what is left of it."""

    path: Path  # the file that it was read from
    header: RunHeader  # what the run was
    steps: tuple[StepRecord, ...] = field(repr=False)  # in ascending order
    complete: bool  # whether the run ended in order; False if it was cut short
    # What passes did to each of the run's graphs, by the graph's name; empty if it was not recorded.
    passes: Mapping[str, PipelineReport] = field(default_factory=dict, repr=False)


def header_line(header: RunHeader) -> bytes:
    """Returns the first line of a file; raises what reading it back would."""
    layouts = header.layouts and header.layouts.to_json()
    line = json_line({"format": _FORMAT, "version": FORMAT_VERSION, **vars(header), "layouts": layouts})
    _header_from(_parse(line))
    return line


def step_line(record: StepRecord) -> bytes:
    """Returns the line of a step; raises what reading it back would."""
    line = json_line({**vars(record), "loss": record.loss and vars(record.loss)})
    _step_from(_parse(line), len(record.loss.bits) if record.loss else 0)
    return line


def passes_line(passes: Mapping[str, PipelineReport]) -> bytes:
    reports = {name: [each.to_json() for each in report] for name, report in passes.items()}
    proofs = {name: report.proof for name, report in passes.items()}
    return json_line({"passes": reports, "proofs": proofs})


def end_line(num_steps: int) -> bytes:
    return json_line({"end": True, "num_steps": num_steps})


def json_line(data: JSON, default: Callable[[Any], JSON] | None = None) -> bytes:
    """Returns data as a line of a file; json escapes line breaks in strings, so a line is one record."""
    return json.dumps(data, allow_nan=False, default=default).encode() + b"\n"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Reads a recorded run; of one that was cut short, everything up to its last whole line.

    Args:
        path: a file that :class:`graphpasses.parity.ParityRecorder` wrote, or is still writing.

    Returns:
        The run.

    Raises:
        RunFileError: the file is missing, empty, no run file, of another format version, cut in its header,
            or has a damaged line; the message names the file and the line.

    Example:
        >>> read_run("missing.jsonl")
        Traceback (most recent call last):
        graphpasses.errors.RunFileError: cannot read 'missing.jsonl': No such file or directory
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFileError(f"cannot read '{path}': {error.strerror}") from None
    if not data:
        raise RunFileError(f"'{path}' is empty: the run was ended before it wrote anything")
    if not data.startswith(_MAGIC[: len(data)]):
        raise RunFileError(f"'{path}' is no graphpasses run: its first line is not a run's header")
    # What follows the last line break is a line that was being written when the run was killed.
    *lines, rest = data.split(b"\n")
    header: RunHeader | None = None
    steps: list[StepRecord] = []
    passes: Mapping[str, PipelineReport] = {}
    ended = False
    for number, line in enumerate(lines, start=1):
        try:
            if ended:
                raise ValueError("it follows the line that ends the run")
            record = _parse(line)
            if header is None:
                if record["version"] != FORMAT_VERSION:
                    break
                header = _header_from(record)
            elif "end" in record:
                ended = True
                if record["num_steps"] != len(steps):
                    raise ValueError(f"the run ended after {record['num_steps']} steps, the file has {len(steps)}")
            elif "layouts" in record:
                header = replace(header, layouts=_layout_from(record["layouts"]))
            elif "passes" in record:
                passes = _passes_from(record["passes"], record["proofs"])
            else:
                step = _step_from(record, header.world_size)
                if steps and step.step <= steps[-1].step:
                    raise ValueError(f"step {step.step} follows step {steps[-1].step}")
                steps.append(step)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFileError(f"'{path}' is damaged in line {number}: {_reason(error)}") from None
    if not lines:
        raise RunFileError(f"'{path}' is cut in its first line: the run was ended while it wrote its header")
    if header is None:
        raise RunFileError(
            f"'{path}' has run format version {record['version']}, this graphpasses reads version {FORMAT_VERSION}: "
            "read it with the release that wrote it, or record it again"
        )
    if ended and rest:
        raise RunFileError(f"'{path}' is damaged in line {len(lines) + 1}: it follows the line that ends the run")
    return Run(path, header, tuple(steps), ended, passes)


def _header_from(record: dict[str, JSON]) -> RunHeader:
    for name in ("torch", "run", "model"):
        _typed(record, name, str)
    _typed(record, "world_size", int)
    layouts = _typed(record, "layouts", dict, NoneType)
    given = {each.name: record[each.name] for each in fields(RunHeader)}
    return RunHeader(**given | {"layouts": None if layouts is None else _layout_from(layouts)})


def _typed(record: dict[str, JSON], name: str, *kinds: type) -> JSON:
    if type(value := record[name]) not in kinds:
        raise ValueError(f"its {name} is {value!r}, not {_KINDS[kinds[0]]}")
    return value


def _layout_from(data: JSON) -> Layout:
    from graphpasses.fsdp.layout import Layout  # imports torch, which takes seconds

    return Layout.from_json(data)


def _parse(line: bytes) -> dict[str, JSON]:
    record = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_number)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"it has the number {text}, which is not JSON")


def _step_from(record: dict[str, JSON], world_size: int) -> StepRecord:
    step, loss = _typed(record, "step", int), _typed(record, "loss", dict, NoneType)
    weights, gradients = dict(record["weights"].items()), dict(record["gradients"].items())
    known = [(name, digest) for name, digest in gradients.items() if digest is not None]
    for name, digest in (*weights.items(), *known):
        if not (isinstance(digest, str) and _HASH.fullmatch(digest)):
            raise ValueError(f"the hash of {name!r} is {digest!r}, not 32 hexadecimal digits")
    return StepRecord(step, None if loss is None else _loss_from(loss, world_size), weights, gradients)


def _loss_from(data: JSON, world_size: int) -> Loss:
    loss = Loss(_typed(data, "dtype", str), *(tuple(_typed(data, name, list)) for name in ("bits", "values")))
    if not len(loss.bits) == len(loss.values) == world_size:
        raise ValueError(f"it has losses of {len(loss.bits)} ranks, and the run has {world_size}")
    if wrong := [each for each in loss.bits if not (isinstance(each, str) and _BITS.fullmatch(each))]:
        raise ValueError(f"the bits of a loss are {wrong[0]!r}, not hexadecimal digits")
    for value in loss.values:
        complex("" + value)  # what a number's text is read as
    return loss


def _passes_from(data: JSON, proofs: Mapping[str, str]) -> Mapping[str, PipelineReport]:
    from graphpasses.graph.pass_report import PassReport, PipelineReport

    return {
        name: PipelineReport(tuple(map(PassReport.from_json, reports)), proof=proofs[name])
        for name, reports in data.items()
    }


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is not JSON"
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    if isinstance(error, TypeError | AttributeError):
        return "a field is of the wrong kind"
    return str(error)
