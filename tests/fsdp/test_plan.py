"""Which parameters share a bucket, in which order, and what a plan refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.errors import PlanError
from graphpasses.fsdp import Bucket, BucketPlan, Reduction


class Block(nn.Module):
    """Has a parameter of its own and children that own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(2))
        self.up = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(1))
        self.out = nn.Linear(2, 5, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout()
        self.emb = nn.Embedding(5, 2)
        self.norm = nn.LayerNorm(2)


def tied() -> Model:
    model = Model()
    model.out.weight = model.emb.weight  # canonical: out.weight, which is seen first
    return model


def block(index: int) -> tuple[str, ...]:
    return tuple(f"layers.{index}.{n}" for n in ("up.weight", "norm.weight", "norm.bias", "gate"))


def resolved(name: str, fqns: tuple[str, ...], **options: Any) -> Bucket:
    return Bucket(fqns, "parameters", name=name, **options)


def test_own_parameters_come_after_those_of_children() -> None:
    buckets = BucketPlan.from_modules([["layers.0"], ["norm", "out"]]).resolve(Model())
    assert buckets == (
        resolved("layers.0", block(0), reshard_after_forward=True),
        resolved("norm, out", ("norm.weight", "norm.bias", "out.weight"), reshard_after_forward=True),
        resolved("(root)", (*block(1), "emb.weight", "temperature")),
    )
    pre_order = [f"layers.0.{name}" for name, _ in Model().layers[0].named_parameters()]
    assert sorted(pre_order) == sorted(buckets[0].fqns)
    assert pre_order != list(buckets[0].fqns)


def test_argument_order_and_nesting() -> None:
    plan = BucketPlan.from_modules([["emb", "layers.0"], ["layers.0.norm"], ["layers.1.up", "layers.1"]])
    assert [bucket.fqns for bucket in plan.resolve(Model())] == [
        ("emb.weight", "layers.0.up.weight", "layers.0.gate"),
        ("layers.0.norm.weight", "layers.0.norm.bias"),
        block(1),  # layers.1.up is inside layers.1, so it is no root of its own
        ("out.weight", "norm.weight", "norm.bias", "temperature"),
    ]


def test_root() -> None:
    explicit = BucketPlan.from_modules([[""], ["layers.0"]])
    assert [bucket.name for bucket in explicit.resolve(Model())] == ["(root)", "layers.0"]
    without = BucketPlan.from_modules([["layers.0"]], root=False)
    assert [bucket.name for bucket in without.resolve(Model())] == ["layers.0"]
    assert [bucket.name for bucket in BucketPlan(()).resolve(Model())] == ["(root)"]


def test_entries_without_parameters_of_their_own_make_no_bucket() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    buckets = BucketPlan.from_modules([["1"], ["0"], [""]]).resolve(model)
    assert [bucket.name for bucket in buckets] == ["0"]


def test_tied_parameters_of_one_entry_are_one() -> None:
    buckets = BucketPlan.from_modules([["emb", "out"]]).resolve(tied())
    assert buckets[0].fqns == ("out.weight",)
    by_name = BucketPlan.from_parameters([["norm.bias", "emb.weight", "out.weight"]]).resolve(tied())
    assert by_name == (resolved("bucket 0", ("norm.bias", "out.weight")),)


def test_shared_module_counts_once_and_goes_by_any_name() -> None:
    model = Model()
    model.layers[1] = model.layers[0]
    model.again = model.emb
    buckets = BucketPlan.from_modules([["layers.1"], ["again"]]).resolve(model)
    assert [bucket.fqns for bucket in buckets[:2]] == [block(0), ("emb.weight",)]
    assert "emb.weight" not in buckets[2].fqns


def test_cycle_of_modules_ends() -> None:
    model = nn.Module()
    model.child = nn.Linear(2, 2, bias=False)
    model.child.add_module("parent", model)
    assert BucketPlan(()).resolve(model) == (resolved("(root)", ("child.weight",)),)
    assert BucketPlan.from_modules([["child"]]).resolve(model) == (
        resolved("child", ("child.weight",), reshard_after_forward=True),
    )


def test_per_block() -> None:
    reduction = Reduction("sum", "sum", dtype=torch.bfloat16)
    model = Model()
    model.layers[0].experts = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})
    model.layers.append(nn.Dropout())
    plan = BucketPlan.per_block(model, reduction)
    assert plan == BucketPlan.from_modules([["layers.0"], ["layers.1"]], reduction)
    buckets = plan.resolve(model)
    assert [bucket.name for bucket in buckets] == ["layers.0", "layers.1", "(root)"]
    assert {bucket.reduction for bucket in buckets} == {reduction}
    assert BucketPlan.per_block(nn.Linear(2, 2)).entries == ()


def test_from_parameters_keeps_the_order_given() -> None:
    plan = BucketPlan.from_parameters([["norm.bias", "emb.weight"], ["norm.weight"]])
    assert [bucket.fqns for bucket in plan.resolve(Model())] == [
        ("norm.bias", "emb.weight"),
        ("norm.weight",),
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            BucketPlan.from_modules([["layer.0"]]),
            (
                "plan entry 'layer.0': the model has no module 'layer.0'; did you mean 'layers.0' "
                "or 'layers.1' or 'layers.0.up'?"
            ),
        ),
        (
            BucketPlan.from_modules([["emb.weight"]]),
            "plan entry 'emb.weight': the model has no module 'emb.weight'",
        ),
        (
            BucketPlan.from_parameters([["emb.wieght"]]),
            (
                "plan entry 'bucket 0': the model has no parameter 'emb.wieght'; did you mean 'emb.weight' "
                "or 'norm.weight' or 'out.weight'?"
            ),
        ),
        (
            BucketPlan.from_parameters([["norm.bias"], ["emb.weight", "norm.bias"]]),
            "parameter 'norm.bias' is in two plan entries: 'bucket 0' and 'bucket 1'",
        ),
        (
            BucketPlan.from_modules([["emb"], ["norm", "emb"]]),
            "parameter 'emb.weight' is in two plan entries: 'emb' and 'norm, emb'",
        ),
    ],
)
def test_plans_that_do_not_fit(plan: BucketPlan, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        plan.resolve(Model())
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("plan", "names", "entries"),
    [
        (BucketPlan.from_modules([["emb"]]), ("emb", "out"), ("emb", "(root)")),
        (BucketPlan.from_modules([["norm", "out"], ["emb"]]), ("out", "emb"), ("norm, out", "emb")),
        (
            BucketPlan.from_parameters([["out.weight"], ["emb.weight"]]),
            ("out", "emb"),
            ("bucket 0", "bucket 1"),
        ),
    ],
)
def test_ties_across_buckets(plan: BucketPlan, names: tuple[str, str], entries: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as raised:
        plan.resolve(tied())
    assert str(raised.value) == (
        f"tied parameters '{names[0]}.weight' and '{names[1]}.weight' are in different plan entries: "
        f"{entries[0]!r} and {entries[1]!r}; eager FSDP2 rejects this at the first forward, so name "
        "the modules of both in one entry, as in fully_shard([a, b])"
    )


def test_malformed_entries() -> None:
    with pytest.raises(PlanError, match=r"^a plan entry is empty; it must name at least one of the modules$"):
        BucketPlan.from_modules([["emb"], []])
    with pytest.raises(PlanError, match=r"^a plan entry is empty; it must name at least one of the parameters$"):
        BucketPlan.from_parameters([[]])
    with pytest.raises(PlanError, match=r"^a plan entry must be a list of FQNs, not the string 'emb'$"):
        BucketPlan.from_modules(["emb"])


def test_reduction_is_checked() -> None:
    with pytest.raises(PlanError, match=r"^reduce_scatter_op must be 'avg', 'sum' or 'tree', not 'max'$"):
        Reduction("max")
    with pytest.raises(PlanError, match=r"^reduce_scatter_op 'sum' goes with all_reduce_op 'sum', not 'avg'$"):
        Reduction("sum")
    with pytest.raises(PlanError, match=r"^postdivide must be positive or None, not 0\.0$"):
        Reduction("sum", "sum", postdivide=0.0)


def test_model_without_fully_shard() -> None:
    with pytest.raises(
        PlanError,
        match=r"^the model has no FSDP2 parameter group; call fully_shard on it first, or give the buckets yourself, "
        r"e\.g\. with BucketPlan\.from_modules$",
    ):
        BucketPlan.from_fully_shard(Model())


def test_plans_are_values() -> None:
    assert Bucket(("a", "b")).name == "a, b"
    assert hash(BucketPlan.from_modules([["a"]])) == hash(BucketPlan.from_modules([["a"]]))
    assert BucketPlan.from_modules([["a"]]) != BucketPlan.from_modules([["a"]], root=False)
