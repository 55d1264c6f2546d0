"""``graphpasses passes``: the catalogue is that of the code."""

from __future__ import annotations

import json

import pytest

from graphpasses import passes
from graphpasses.commands import app
from graphpasses.passes.runner import GraphPass


def test_every_pass_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["passes"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    classes = [getattr(passes, name) for name in passes.__all__]
    expected = {cls.name for cls in classes if isinstance(cls, type) and issubclass(cls, GraphPass)}
    assert {row.split()[0] for row in rows} == expected
    assert next(row for row in rows if row.startswith("lower-embedding-bags")).split()[1:3] == [
        "rounding",
        "dynamo",
    ]


def test_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["passes", "reshard-after-forward"]) == 0
    first, *text = capsys.readouterr().out.splitlines()
    assert first == "reshard-after-forward: bitwise; step graphs; runs after bucket-fsdp-collectives"
    assert "Gathers the parameters of resharded buckets again before backward first reads them." in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["passes", "fuse-size-tensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fuse-size-tensors"]["stages"] == ["joint", "step"]


def test_unknown_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["passes", "fuse-size-tensor"]) == 2
    assert capsys.readouterr().err == (
        "graphpasses: there is no pass 'fuse-size-tensor'; did you mean 'fuse-size-tensors'?; see graphpasses "
        "passes\n"
    )
