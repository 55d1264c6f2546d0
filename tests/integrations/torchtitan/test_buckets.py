"""Buckets of a module that runs in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpasses.analysis.parameter_collectives import CAST, find_grad_reductions
from graphpasses.errors import PlanError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import BucketLayout, Layout, make_bucket_layout
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.fsdp.plan import Bucket, BucketPlan
from graphpasses.integrations.torchtitan.buckets import chunked_buckets
from graphpasses.passes import default_pipeline
from tests.helpers.models import LanguageModel, on_fake_ranks


def buckets_of(model: nn.Module) -> tuple[BucketPlan, Layout]:
    """What torchtitan shards: the blocks, and one group of embedding (if tied), norm and head."""
    plan = BucketPlan.from_modules([["layers.0"], ["layers.1"], ["emb", "norm", "head"]])
    plan = BucketPlan.from_parameters([bucket.fqns for bucket in plan.resolve(model)])
    return plan, Layout(tuple(layout_of(model, bucket) for bucket in plan.resolve(model)))


def layout_of(model: nn.Module, bucket: Bucket) -> BucketLayout:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return make_bucket_layout(
        "reduce_scatter", range(4), "sum", torch.float32, [(fqn, shapes[fqn], 0) for fqn in bucket.fqns]
    )


@pytest.mark.parametrize("tied", [False, True])
def test_head_in_chunks(tied: bool) -> None:
    with on_fake_ranks(LanguageModel(tied=tied), reduce_dtype=torch.float32) as captured:
        plan, layout = chunked_buckets(*buckets_of(captured.model), captured.model, "head")
        chunked, rest = plan.resolve(captured.model)[2:]
        assert (chunked.name, chunked.fqns, chunked.accumulates) == (
            "head, in chunks",
            ("head.weight",),
            True,
        )
        assert (rest.fqns, rest.accumulates) == (("emb.weight", "norm.weight", "norm.bias"), False)
        names = [[entry.fqn for entry in bucket.entries] for bucket in layout.buckets[2:]]
        assert names == [
            ["emb.weight" if tied else "head.weight"],
            ["emb.weight", "norm.weight", "norm.bias"],
        ]

        graph = default_pipeline(plan, expected_layout=layout).run(captured)
        assert not diff_layouts(layout, graph_layout(graph))
        slots = graph.gradient_slots()["emb.weight"]
        assert len(slots) == (2 if tied else 1)
        assert all(graph.output_values[slot] is not None for slot in slots)  # whoever trains adds the two


def test_tied_uses_in_chunks_are_added_apart() -> None:
    """Several uses by each of two names: those in chunks are added after their cast, the others before."""

    class Twice(LanguageModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + self.head(self.emb(tokens))

    with on_fake_ranks(Twice(), reduce_dtype=torch.float32) as captured:
        plan, layout = chunked_buckets(*buckets_of(captured.model), captured.model, "head")
        pipeline = default_pipeline(plan, expected_layout=layout, disable=("bucket-fsdp-collectives",))
        found = find_grad_reductions(pipeline.run(captured))["emb.weight"]
        gradients = {reduction.name: reduction.gradient for reduction in found}
        assert gradients.keys() == {"emb.weight", "head.weight"}
        assert gradients["emb.weight"].meta["val"].dtype == torch.bfloat16
        assert {node.target for node in gradients["head.weight"].all_input_nodes} == {CAST}


def test_what_cannot_be_taken_apart() -> None:
    model = LanguageModel()
    plan, layout = buckets_of(model)
    with pytest.raises(PlanError) as raised:
        chunked_buckets(plan, layout, model, "emb")
    assert str(raised.value) == (
        "'emb.weight' is the first name of a tied parameter, and its module runs in chunks; register that module "
        "behind the one it is tied to"
    )
    by_modules = BucketPlan.from_modules([["layers.0"]])
    with pytest.raises(PlanError) as raised:
        chunked_buckets(by_modules, layout, model, "head")
    assert str(raised.value) == (
        "no plan entry by parameters has 'emb.weight' of module 'head', which runs in chunks"
    )
