"""File, class and command-line name of every pass agree, and the default pipeline has them all."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import graphpasses.passes
from graphpasses.errors import LayoutError
from graphpasses.fsdp import BucketPlan, Layout
from graphpasses.passes import default_pipeline, recommender_pipeline
from graphpasses.passes.runner import GraphPass, Numerics

FILES = sorted(info.name for info in pkgutil.iter_modules(graphpasses.passes.__path__))


def passes_in(file: str) -> list[type[GraphPass]]:
    module = importlib.import_module(f"graphpasses.passes.{file}")
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, GraphPass) and value.__module__ == module.__name__
    ]


def test_there_are_passes() -> None:
    assert {"bucket_fsdp_collectives", "coalesce_grad_reductions", "deduplicate_shared"} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_names_agree(file: str) -> None:
    (cls,) = passes_in(file)
    assert cls.name == file.replace("_", "-")
    assert cls.__name__.lower() == file.replace("_", "")
    assert importlib.import_module(cls.__module__).__all__ == [cls.__name__]
    assert getattr(graphpasses.passes, cls.__name__) is cls
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert "Example:" in (cls.__doc__ or "")
    assert isinstance(cls.numerics, Numerics)


def test_runs_after_names_passes() -> None:
    names = {file.replace("_", "-") for file in FILES}
    for file in FILES:
        for cls in passes_in(file):
            assert cls.runs_after <= names - {cls.name}


def test_default_pipeline() -> None:
    pipeline = default_pipeline(BucketPlan.from_modules([]))
    assert all(p.numerics is Numerics.BITWISE for p in pipeline.passes)
    assert [p.name for p in pipeline.passes][:3] == [
        "deduplicate-shared",
        "coalesce-grad-reductions",
        "bucket-fsdp-collectives",
    ]


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
