"""torchtitan's trainers have the same weights on one rank and on several, which share experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.any_cluster.cases import Case, Cluster
from experiments.any_cluster.run import train_and_judge
from experiments.harness.parity import ParityExperiment
from graphpasses.errors import UnsupportedError
from graphpasses.integrations.torchtitan.cpu_configs import Recipe

pytest.importorskip("torchtitan")

ONE = Cluster("1 rank", (1,))
BF16 = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "bfloat16"}
CASE = Case(
    "deepseek_v3",
    Recipe("deepseek_v3", layers=(1,), num_experts=4, reduce_dtype="bfloat16"),
    None,
    (ONE, Cluster("graph_trainer, 2 ranks", (2,), captured=True, experts=2)),
    ((ONE, Cluster("by FSDP2, 2 ranks", (2,), added="by FSDP2", experts=2)),),
    any_expert_degree=True,
)


@pytest.mark.multiprocess
def test_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    """torchtitan's data loader, microbatches, clipping and shared experts among what would make them other ones."""
    experiment = ParityExperiment("", (CASE,), 2, tmp_path)
    verdicts = train_and_judge(experiment, (CASE,))
    assert [(each.variant, each.status) for each in verdicts] == [
        ("graph_trainer, 2 ranks", "ok"),
        ("by FSDP2, 2 ranks", "ok"),
    ]


class Counter:
    """A loader of numbers that says where it is."""

    def __init__(self, num: int) -> None:
        self.num, self.next = num, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.num:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def test_microbatches_are_dealt() -> None:
    from graphpasses.integrations.torchtitan.any_cluster import _DealtLoader

    loaders = [_DealtLoader(Counter(9), rank, 4) for rank in range(4)]
    assert [list(each) for each in loaders] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_other_numbers_of_ranks_go_on() -> None:
    from graphpasses.integrations.torchtitan.any_cluster import _DealtLoader

    begun = [_DealtLoader(Counter(9), rank, 4) for rank in range(4)]
    assert [next(iter(each)) for each in begun] == [0, 1, 2, 3]
    gone_on = [_DealtLoader(Counter(9), rank, 2) for rank in range(2)]
    for each in gone_on:
        each.load_state_dict(begun[3].state_dict())
    assert [list(each) for each in gone_on] == [[4, 6], [5, 7]]


def test_what_is_split_otherwise_is_refused() -> None:
    from graphpasses.integrations.torchtitan import any_cluster as titan

    def config(**changed: int) -> Any:
        degrees = {f"{name}_parallel_degree": 1 for name in ("tensor", "pipeline", "context")}
        return SimpleNamespace(parallelism=SimpleNamespace(**degrees | changed))

    def trainer(pipeline: str = "graphpasses", dp_shard: int = 1) -> Any:
        compiled = SimpleNamespace(compile=SimpleNamespace(pass_pipeline=pipeline))
        return SimpleNamespace(config=compiled, parallel_dims=SimpleNamespace(dp_shard=dp_shard))

    titan._check_degrees(config())
    with pytest.raises(UnsupportedError, match=r"--parallelism\.tensor_parallel_degree is 2, .*Set it to 1$"):
        titan._check_degrees(config(tensor_parallel_degree=2))
    with pytest.raises(
        UnsupportedError, match=r"pipeline_parallel_degree is 2, .*, or run the stages by torch's sch"
    ):
        titan._check_degrees(config(pipeline_parallel_degree=2))
    with pytest.raises(UnsupportedError, match="pass_pipeline 'default' reduces in NCCL's order; use "):
        titan._check_graph_trainer(trainer("default", dp_shard=2))
    with pytest.raises(UnsupportedError, match=r"graph_trainer shards over one rank, .*Train eagerly"):
        titan._check_graph_trainer(trainer())
    titan._check_overlap(SimpleNamespace(compile=SimpleNamespace()))  # the eager trainer's
    with pytest.raises(UnsupportedError, match=r"ep_overlap\.enabled lets experts compute .* in halves"):
        titan._check_overlap(SimpleNamespace(compile=SimpleNamespace(ep_overlap=SimpleNamespace(enabled=True))))


def test_experts_that_compute_otherwise_are_refused() -> None:
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from graphpasses.integrations.torchtitan.any_cluster import check_experts, compute_microbatches_apart
    from graphpasses.integrations.torchtitan.cpu_configs import trainer_config

    class OtherExperts(GroupedExperts):
        def _grouped_mm(self, **factors: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    class OtherDispatcher(AllToAllTokenDispatcher):
        pass

    recipe = Recipe("deepseek_v3", layers=(0, 1), num_experts=4)
    with torch.device("meta"):
        model = trainer_config(recipe, Path(), 1, None).model_spec.model.build()
    routed = model.layers["1"].moe.routed_experts

    def apart(accumulate: torch.dtype | None = None, **dtypes: str) -> None:
        compute_microbatches_apart(model, SimpleNamespace(**BF16 | dtypes), accumulate)

    check_experts(model)
    apart()
    for options in ({"accumulate": torch.float32}, {"mixed_precision_reduce": "float32"}):
        with pytest.raises(
            UnsupportedError, match=r"added in torch\.float32 of weights in torch\.bfloat16: those of"
        ):
            apart(**options)
    routed.inner_experts.__class__ = OtherExperts
    with pytest.raises(
        UnsupportedError, match=r"'layers\.1\.moe\.routed_experts' has experts of OtherExperts, whose"
    ):
        apart()
    routed.token_dispatcher.__class__ = OtherDispatcher
    with pytest.raises(UnsupportedError, match="sends tokens to experts by OtherDispatcher, whose bits were not"):
        check_experts(model)


def test_products_of_each_rank_s_tokens_are_added_in_a_tree() -> None:
    """Four ranks share two experts; one of them sends no token, another none to the first expert."""
    from graphpasses._torchtitan import ProductsByRank

    counts = torch.tensor([[3, 5], [0, 0], [0, 4], [8, 1]])
    generator = torch.Generator().manual_seed(0)
    tokens, weights = (torch.randn(n, 16, 16, generator=generator).bfloat16() for n in (int(counts.sum()), 2))
    tokens, factors = tokens[:, 0], torch.randn(len(tokens), 16, generator=generator).bfloat16()

    def product(**factors: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(factors["A"], factors["B_t"], offs=factors["offs"])

    def gradient(rows: slice, ends: torch.Tensor, product: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = weights.clone().requires_grad_()
        result = product(A=tokens[rows], B_t=leaf, offs=ends.to(torch.int32))
        (result * factors[rows]).sum().backward()
        assert leaf.grad is not None
        return result, leaf.grad

    dispatcher = SimpleNamespace(_sync_token_count_exchange=lambda: (None, None, counts.sum(1).tolist()))
    experts = SimpleNamespace(_grouped_mm=product)
    ProductsByRank(SimpleNamespace(token_dispatcher=dispatcher, inner_experts=experts))
    dispatcher._sync_token_count_exchange()
    result, added = gradient(slice(None), counts.flatten().cumsum(0), experts._grouped_mm)

    ends = counts.sum(1).cumsum(0).tolist()
    alone = [gradient(slice(a, b), c.cumsum(0), product) for a, b, c in zip([0, *ends], ends, counts, strict=False)]
    assert torch.equal(result, torch.cat([each for each, _ in alone]))
    first, second, third, fourth = (each for _, each in alone)
    assert torch.equal(added, (first + second) + (third + fourth))
    assert not torch.equal(added, ((first + second) + third) + fourth)  # control
