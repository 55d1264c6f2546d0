"""What a damaged run file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpasses.errors import RunFileError
from graphpasses.parity import read_run
from tests.helpers.recorded_runs import record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def edited(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_text("".join(lines))


VERSION_2 = (
    "has run format version 3, this graphpasses reads version 2: "
    "read it with the release that wrote it, or record it again"
)
DAMAGE = [
    (1, '"step": 0', '"step" 0', "is damaged in line 2: it is not JSON"),
    (1, '"step": 0', '"stop": 0', "is damaged in line 2: it has no 'step'"),
    (1, '"step": 0', '"step": "0"', "is damaged in line 2: its step is '0', not a number"),
    (2, '"step": 1', '"step": 0', "is damaged in line 3: step 0 follows step 0"),
    (2, '"weights": {', '"weights": 1, "x": {', "is damaged in line 3: a field is of the wrong kind"),
    (2, '{"step', '[], {"step', "is damaged in line 3: it is not JSON"),
    (
        2,
        '"weights": {',
        '"weights": {"x": null, ',
        "is damaged in line 3: the hash of 'x' is None, not 32 hexadecimal digits",
    ),
    (1, '"step": 0', '"step": 0, "step": 0', "is damaged in line 2: it has 'step' twice"),
    (1, '"step": 0', '"step": NaN', "is damaged in line 2: it has the number NaN, which is not JSON"),
    (1, '"bits": [', '"bits": ["3f", ', "is damaged in line 2: it has losses of 2 ranks, and the run has 1"),
    (
        1,
        '"bits": ["be',
        '"bits": ["-b',
        "is damaged in line 2: the bits of a loss are '-ba78330', not hexadecimal digits",
    ),
    (1, '"dtype": "float32"', '"dtype": 32', "is damaged in line 2: its dtype is 32, not text"),
    (1, '"values": ["', '"values": ["x', "is damaged in line 2: complex() arg is a malformed string"),
    (0, '"layouts": null', '"layouts": {}', "is damaged in line 1: it has no 'buckets'"),
    (0, '"model": ""', '"model": 1', "is damaged in line 1: its model is 1, not text"),
    (4, "{", '{"step": 9}\n{', "is damaged in line 5: it has no 'loss'"),
    (4, "}", '}\n{"step": 9}', "is damaged in line 6: it follows the line that ends the run"),
    (4, "}\n", '}\n{"st', "is damaged in line 6: it follows the line that ends the run"),
    (
        4,
        '"num_steps": 3',
        '"num_steps": 4',
        "is damaged in line 5: the run ended after 4 steps, the file has 3",
    ),
    (0, '"world_size"', '"ranks"', "is damaged in line 1: it has no 'world_size'"),
    (0, '"run": ""', '"run": "', "is damaged in line 1: it is not JSON"),
    (
        0,
        '"version": 2',
        '"version": 3',
        VERSION_2,
    ),
    (0, '"format"', '"kind"', "is no graphpasses run: its first line is not a run's header"),
]


@pytest.mark.parametrize(("line", "old", "new", "message"), DAMAGE)
def test_damage_is_named(path: Path, line: int, old: str, new: str, message: str) -> None:
    record(path)
    edited(path, line, old, new)
    with pytest.raises(RunFileError) as error:
        read_run(path)
    assert str(error.value) == f"'{path}' {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: the run was ended before it wrote anything"),
        (b"\x89PNG\r\n\x1a\n", "is no graphpasses run: its first line is not a run's header"),
        (b"{}\n", "is no graphpasses run: its first line is not a run's header"),
        (b'{"format": "graph', "is cut in its first line: the run was ended while it wrote its header"),
    ],
)
def test_other_files(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RunFileError) as error:
        read_run(path)
    assert str(error.value) == f"'{path}' {message}"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFileError) as error:
        read_run(tmp_path / "no.jsonl")
    assert str(error.value) == f"cannot read '{tmp_path}/no.jsonl': No such file or directory"
    with pytest.raises(RunFileError) as error:
        read_run(tmp_path)
    assert str(error.value) == f"cannot read '{tmp_path}': Is a directory"
