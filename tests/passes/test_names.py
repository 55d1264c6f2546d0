"""File, class and command-line name of every pass agree, and the default pipeline has them all."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import graphpasses.passes
from graphpasses.errors import LayoutError, PipelineError
from graphpasses.fsdp import BucketPlan, Layout
from graphpasses.passes import default_pipeline, recommender_pipeline
from graphpasses.passes.runner import GraphPass, Numerics
from graphpasses.scale import Wire

FOLDERS = ("fsdp", "embedding", "kernels")
FILES = sorted(
    f"{folder}.{info.name}"
    for folder in FOLDERS
    for info in pkgutil.iter_modules([f"{graphpasses.passes.__path__[0]}/{folder}"])
    if not info.name.startswith("_")  # a part of a pass
)


def pass_in(file: str) -> type[GraphPass]:
    module = importlib.import_module(f"graphpasses.passes.{file}")
    (cls,) = (
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, GraphPass) and value.__module__ == module.__name__
    )
    return cls


PASSES = {file: pass_in(file) for file in FILES}


def test_there_are_passes() -> None:
    assert {"fsdp.bucket_fsdp_collectives", "fsdp.deduplicate_shared", "embedding.fuse_tbe"} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_names_agree(file: str) -> None:
    cls, name = PASSES[file], file.rpartition(".")[2]
    assert cls.name == name.replace("_", "-")
    assert cls.__name__.lower() == name.replace("_", "")
    assert getattr(graphpasses.passes, cls.__name__) is cls
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert "Example:" in (cls.__doc__ or "")
    assert isinstance(cls.numerics, Numerics)


@pytest.mark.parametrize("file", FILES)
def test_every_pass_has_a_golden_graph(file: str) -> None:
    folder, name = file.split(".")
    sources = "".join(path.read_text() for path in (Path(__file__).parent / folder).glob("test_golden*.py"))
    assert f"def test_{name}(" in sources
    assert f"golden({PASSES[file].__name__}(" in sources


def test_every_pass_is_in_a_pipeline() -> None:
    plan = BucketPlan.from_modules([])
    pipeline = recommender_pipeline(plan, lower_embedding_bags=True)
    fused = default_pipeline(plan, canonical=True, fuse_table_updates=True, fuse=True)
    scheduled = default_pipeline(plan, wire=Wire())
    assert {type(p) for p in (*pipeline.passes, *fused.passes, *scheduled.passes)} == set(PASSES.values())


def test_runs_after_names_passes() -> None:
    names = {cls.name for cls in PASSES.values()}
    for cls in PASSES.values():
        assert cls.runs_after <= names - {cls.name}


def test_default_pipeline() -> None:
    pipeline = default_pipeline(BucketPlan.from_modules([]))
    assert all(p.numerics is Numerics.BITWISE for p in pipeline.passes)
    assert [p.name for p in pipeline.passes][:3] == [
        "deduplicate-shared",
        "coalesce-grad-reductions",
        "bucket-fsdp-collectives",
    ]


def test_a_wire_takes_prefetching_s_place() -> None:
    plan = BucketPlan.from_modules([])
    fixed, scheduled = (
        [p.name for p in default_pipeline(plan, **given).passes] for given in ({}, {"wire": Wire(), "budget": 10**9})
    )
    assert [("schedule-collectives" if name == "prefetch-collectives" else name) for name in fixed] == scheduled
    assert "prefetch-collectives" in fixed
    with pytest.raises(PipelineError, match=r"default_pipeline\(wire=Wire\(\), budget=…\)"):
        default_pipeline(plan, budget=1)


def test_recommender_pipeline_has_the_passes_of_both_where_there_is_a_plan() -> None:
    plan, expected_layout = BucketPlan.from_modules([]), Layout(())
    sparse, both = recommender_pipeline(), recommender_pipeline(plan, expected_layout=expected_layout)
    dense = default_pipeline(plan, expected_layout=expected_layout)
    assert set(both.passes) == {*sparse.passes, *dense.passes}
    for part in (sparse, dense):
        assert [p for p in both.passes if p in part.passes] == list(part.passes)
    assert all(p.numerics is Numerics.BITWISE for p in both.passes)


def test_recommender_pipeline_with_an_expected_layout_alone() -> None:
    with pytest.raises(LayoutError, match=r"recommender_pipeline\(plan, expected_layout=expected_layout\)"):
        recommender_pipeline(expected_layout=Layout(()))
