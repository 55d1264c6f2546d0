"""Steps side by side."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from graphpasses.errors import UnsupportedError
from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.graph.pass_report import Numerics, PassReport, PipelineReport
from graphpasses.graph.traffic import Event, Traffic, Transfer
from graphpasses.scale import Speeds
from graphpasses.scale.step_time import bucketings, scale_rows, steps_of_passes

SPEEDS = Speeds(ranks=(8, 64), algorithms=("ring",), tokens=1000)
PARAMETERS = [(name, (4096, 512), 0) for name in ("a", "b", "c")]
LAYOUT = Layout((make_bucket_layout("reduce_scatter", range(8), "avg", torch.bfloat16, PARAMETERS),))


def test_fewer_buckets_take_less_time_and_none_hides_nothing() -> None:
    steps = bucketings(LAYOUT, 8, SPEEDS, {"two": [("b", "c")]})
    rows = {(row.step, row.num_ranks): row for row in scale_rows(steps, SPEEDS)}
    single, run, two = (rows[name, 64] for name in ("no passes: one per parameter", "the run's buckets", "two"))
    assert [row.num_transfers for row in (single, run, two)] == [9, 3, 6]
    assert len({row.num_bytes for row in (single, run, two)}) == 1
    assert run.times["ring"].wire < two.times["ring"].wire < single.times["ring"].wire
    assert single.times["ring"].hidden == 0 < two.times["ring"].hidden
    assert rows["two", 8].times["ring"].wire < two.times["ring"].wire


def test_ranks_that_do_not_fit_say_so() -> None:
    hybrid = Traffic(32, (Transfer("all_reduce", 64, 2, 16),), (Event("launch", 0), Event("wait", 0)))
    small, large = scale_rows({"mine": hybrid}, SPEEDS)
    assert small.trouble.startswith("8 ranks do not divide by the 16")
    assert not large.trouble
    assert json.loads(json.dumps([row.to_json() for row in (small, large)]))[1]["times"]["ring"]["hidden"] == 0


def test_passes_before_and_after() -> None:
    step = Traffic(8, (), ())
    after = replace(step, num_ranks=16)
    report = PassReport("bucket", Numerics.BITWISE, 1, (1, 1), ({}, {}), 0.0, (), traffic=(step, after))
    found = steps_of_passes(PipelineReport((report, replace(report, name="prefetch"))))
    assert found == {"captured": step, "after bucket": after, "after prefetch": after}
    assert steps_of_passes(PipelineReport((replace(report, traffic=None),))) == {}


def test_what_is_not_modelled() -> None:
    step = Traffic(8, (Transfer("gather", 64, 8, 1),), (Event("launch", 0),))
    with pytest.raises(UnsupportedError, match="how long 'gather' takes is not modelled"):
        scale_rows({"mine": step}, SPEEDS)
