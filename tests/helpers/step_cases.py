"""Models, ``fully_shard`` calls and reductions, trained by eager FSDP2 and by captured steps on real ranks."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from graphpasses._torch.tested_versions import RELEASE
from graphpasses.analysis.parameter_collectives import collective_ranks
from graphpasses.fsdp import diff_layouts, eager_layout
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.graph import TrainGraph, is_collective
from graphpasses.parity.launch import run_ranks
from tests.helpers.models import (
    Even,
    Interleaved,
    LanguageModel,
    Parallel,
    Promoting,
    PromotingTwice,
    Recomputed,
    Reused,
    Short,
    TwoNames,
    Unused,
    even_token_batch,
    frozen,
    make_mesh,
    make_parallel_meshes,
    mixed_dtypes,
    next_token_loss,
    same_bits,
    token_batch,
)

Batch = tuple[torch.Tensor, torch.Tensor]

NUM_RANKS = 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
Wide = partial(LanguageModel, width=64, hidden=255, num_blocks=1)
LAYERS = (("layers.0",), ("layers.1",))
LAYER = LAYERS[:1]


@dataclass(frozen=True)
class Case:
    """One model, its ``fully_shard`` calls before the root's, and how gradients are reduced.

    It has four ranks where the order of addition, factors, a second axis, or shards without elements are what is
    tried, else two.
    """

    build: Callable[[], nn.Module] = LanguageModel
    calls: Sequence[Sequence[str]] = LAYERS
    policy: MixedPrecisionPolicy = field(default_factory=lambda: BF16)
    hybrid: bool = False
    tensor_parallel: bool = False
    shard_dim: int = 0
    factor: float | None = None
    is_summed_by_layers: bool = False  # whose gradients are then not divided, whatever the factor of the root
    reshard_after_forward: bool | None = False
    num_backwards: int = 1
    disable: tuple[str, ...] = ()
    is_nccl: bool = False
    is_reversed: bool = False
    num_ranks: int = 2
    is_rounded: bool = False  # as SimpleFSDP rounds, and FSDP2 from torch 2.15 on does not

    @cached_property
    def parallel_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        return make_parallel_meshes()

    @cached_property
    def mesh(self) -> DeviceMesh:
        if self.tensor_parallel:
            return self.parallel_meshes[0]
        if self.is_nccl:
            group = dist.new_group(backend="nccl_sim")
            # A name of its own: DTensor's caches take meshes of equal ranks and names for one, groups apart.
            return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("nccl",))
        return make_mesh(dist.get_world_size(), hybrid=self.hybrid)

    def batch(self, seed: int) -> Batch:
        if self.tensor_parallel:
            return even_token_batch(seed + self.mesh.get_local_rank())
        return token_batch(seed + dist.get_rank())


CASES = {
    "tied": Case(Short, (*LAYER, ("emb", "norm", "head")), num_ranks=4),
    "resharded": Case(reshard_after_forward=None),
    "recomputed": Case(partial(Recomputed, num_blocks=1), LAYER, reshard_after_forward=None),
    "three_uses": Case(Reused, [["block"], ["mixers.0", "mixers.1", "mixers.2"]]),
    "interleaved": Case(Interleaved, [["mixer"]]),
    "two_names": Case(TwoNames, [["layers.0"]]),
    "frozen": Case(frozen),
    "unused": Case(partial(Unused, num_blocks=1), LAYER),
    "hybrid": Case(Short, LAYER, hybrid=True, num_backwards=2, num_ranks=4),
    "tensor_parallel": Case(
        partial(Parallel, num_blocks=1),
        LAYER,
        reshard_after_forward=None,
        tensor_parallel=True,
        num_backwards=2,
        num_ranks=4,
    ),
    # A weight that is used twice, and norms whose weights get float32 gradients.
    "tensor_parallel_fp32_reduce": Case(
        partial(Parallel, num_ups=2, norm=nn.RMSNorm, num_blocks=1),
        LAYER,
        MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        tensor_parallel=True,
        num_ranks=4,
    ),
    "shard_1": Case(Even, shard_dim=1),
    "fp32": Case(Short, LAYER, MixedPrecisionPolicy()),
    "mixed_dtypes": Case(mixed_dtypes, [["layers.0", "layers.1"]], MixedPrecisionPolicy()),
    "fp32_reduce": Case(Short, LAYER, MixedPrecisionPolicy(torch.bfloat16, torch.float32), num_backwards=2),
    "promoting": Case(partial(Promoting, num_blocks=1), LAYER, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "promoting_twice": Case(
        partial(PromotingTwice, num_blocks=1), LAYER, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "no_reduce_dtype": Case(Short, LAYER, MixedPrecisionPolicy(torch.bfloat16)),
    "fp16_reduce": Case(Short, LAYER, MixedPrecisionPolicy(torch.bfloat16, torch.float16), num_ranks=4),
    "hybrid_fp16_reduce": Case(
        Short, LAYER, MixedPrecisionPolicy(torch.bfloat16, torch.float16), hybrid=True, num_ranks=4
    ),
    "factors": Case(Short, LAYER, factor=4.0, is_summed_by_layers=True, num_ranks=4),
    # Long enough for two NCCL rings, whose order of addition depends on the place in the buffer.
    "nccl_order": Case(Wide, [["layers.0"]], is_nccl=True, num_ranks=4),
    # As torchtitan shards: FSDP2 asks for PREMUL_SUM by one.
    "nccl_factor_one": Case(Wide, [["layers.0"]], is_nccl=True, factor=1.0, num_ranks=4),
}


# FSDP2 of torch 2.15 adds these gradients in the dtype of their reduction, which SimpleFSDP cannot; it is refused.
NOT_SIMPLE = {"fp16_reduce", "hybrid_fp16_reduce"}
SIMPLE_CASES = {name: case for name, case in CASES.items() if not (RELEASE >= (2, 15) and name in NOT_SIMPLE)}


def shard_eagerly(case: Case, model: nn.Module) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": case.mesh,
        "mp_policy": case.policy,
        "reshard_after_forward": case.reshard_after_forward,
        "shard_placement_fn": lambda parameter: Shard(case.shard_dim),
    }
    for call in case.calls:
        modules = [model.get_submodule(fqn) for fqn in call]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_summed = case.is_summed_by_layers and module is not model
            if case.factor is not None:
                module.set_gradient_divide_factor(1.0 if is_summed else case.factor)
            module.set_force_sum_reduction_for_comms(is_summed)
    return model


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the collectives that FSDP2 launches."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return launch

    names = {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "all_reduce": "all_reduce",
    }
    patches = [mock.patch.object(dist, api, counted(op, getattr(dist, api))) for api, op in names.items()]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


def local_bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(a: nn.Module, b: nn.Module, read: Callable[[nn.Parameter], torch.Tensor | None]) -> list[str]:
    """Names the parameters whose value, as read, differs in any bit."""
    differing = []
    for (fqn, p), (fqn_b, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert fqn == fqn_b
        x, y = local_bits(read(p)), local_bits(read(q))
        if (x is None) != (y is None) or (x is not None and not same_bits(x, y)):
            differing.append(fqn)
    return differing


@dataclass
class Outcome:
    """What one case did, per step: whether the loss is equal, and which gradients and weights are not."""

    losses: list[bool] = field(default_factory=list)
    gradients: list[list[str]] = field(default_factory=list)
    weights: list[list[str]] = field(default_factory=list)
    eager_collectives: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    layouts: str = ""
    error: str = ""
    control: Outcome | None = None  # of a step that must differ, trained behind the others

    @property
    def is_equal(self) -> bool:
        return not self.error and all(self.losses) and not any(self.gradients + self.weights)


def check_equals_eager(outcomes: list[Outcome], num_losses: int) -> None:
    """Checks that a case has eager's bits on all ranks.

    Args:
        outcomes: of each rank.
        num_losses: how many were to be compared.
    """
    for rank, outcome in enumerate(outcomes):
        assert outcome.is_equal, f"rank {rank}: {outcome.error or outcome}"
        assert len(outcome.losses) == num_losses


def collectives_beside_fsdp(graph: TrainGraph) -> Counter[str]:
    """Counts those of tensor parallelism: eager launches them, too, but elsewhere than FSDP2's."""
    infos = graph.parameters.values()
    groups = {info.shard_ranks for info in infos} | {info.replicate_ranks for info in infos}
    nodes = (node for node in graph.graph.nodes if is_collective(node) and collective_ranks(node) not in groups)
    return Counter(node.target.__name__.split(".")[0] for node in nodes)


def outcome_of(captured: TrainGraph, step: TrainGraph, eager: nn.Module, laid_out: TrainGraph) -> Outcome:
    """Counts a step's collectives, and compares a graph's layout with that of eager FSDP2.

    Args:
        captured: the step as captured.
        step: the step that runs.
        eager: the eager reference.
        laid_out: the graph whose layout is compared.
    """
    collectives = Counter(step.collectives())
    collectives.subtract(collectives_beside_fsdp(captured))
    layout = eager_layout(eager)
    unused = step.without_gradient & {entry.fqn for bucket in layout.buckets for entry in bucket.entries}
    layouts = str(diff_layouts(layout.without(unused), graph_layout(laid_out)))
    return Outcome(collectives=dict(+collectives), layouts=layouts)


def train_both(
    outcome: Outcome,
    eager: nn.Module,
    model: nn.Module,
    batch: Callable[[int], Batch],
    run: Callable[[int, int, Batch], torch.Tensor],
    *,
    num_steps: int,
    num_backwards: int = 1,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> None:
    """Trains two models on the same batches, and adds to an outcome what is equal at each step.

    Args:
        outcome: of the case.
        eager: the reference, which is trained eagerly.
        model: the other.
        batch: given a seed, returns this rank's batch.
        run: runs ``model`` forward and backward; given the step, which backward of it, and the batch.
        num_steps: optimizer steps.
        num_backwards: in each of them.
        optimizer_class: of both, with a learning rate of 0.01.
    """
    optimizers = [optimizer_class(each.parameters(), lr=1e-2) for each in (eager, model)]
    for index in range(num_steps):
        for backward in range(num_backwards):
            given = batch(100 * index + 10 * backward)
            with counting() as counts:
                expected = next_token_loss(eager, *given)
                expected.backward()
            outcome.losses.append(same_bits(run(index, backward, given), expected))
        outcome.eager_collectives = dict(counts)
        outcome.gradients.append(differences(eager, model, lambda p: p.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        outcome.weights.append(differences(eager, model, lambda p: p))


def each_outcome(train: Callable[[str], Outcome], names: Iterable[str]) -> dict[str, Outcome]:
    """Trains cases by name; one that fails keeps no other from running."""
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = train(name)
        except Exception:
            outcomes[name] = Outcome(error=traceback.format_exc())
    return outcomes


def of_this_world(cases: dict[str, Case]) -> list[str]:
    """Names the cases that are trained on as many ranks as there are."""
    return [name for name, case in cases.items() if case.num_ranks == dist.get_world_size()]


def outcomes_by_case(train_all: Callable[[], dict[str, Outcome]], *nums_ranks: int) -> dict[str, list[Outcome]]:
    """Returns the outcomes of all ranks by case.

    Args:
        train_all: trains what is trained on as many ranks as there are, and returns this rank's outcomes by case.
        nums_ranks: numbers of ranks, each of which is launched.
    """
    launches = [run_ranks(train_all, num_ranks, timeout=300.0) for num_ranks in nums_ranks]
    return {name: [each[name] for each in ranks] for ranks in launches for name in ranks[0]}
