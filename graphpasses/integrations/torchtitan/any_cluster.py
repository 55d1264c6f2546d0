"""torchtitan's trainers with the same bits on any number of data-parallel ranks, eager and graph_trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from graphpasses._torchtitan import ProductsByRank, has_torchtitans_products
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.canonical import canonical_reductions
from graphpasses.fsdp.canonical_norm import canonical_clip_grad_norm_
from graphpasses.fsdp.canonical_update import check_canonical_update
from graphpasses.fsdp.microbatches import MicrobatchTree
from graphpasses.integrations.torchtitan.buckets import ACCUMULATE
from graphpasses.integrations.torchtitan.refusals import FUSED, PIPELINE

# Degrees that split a sample's work, so that products and sums are other ones, or whose trainer was not run.
_DEGREES = ("tensor", "pipeline", "context")
# What routers count, for torchtitan's balancing of experts' loads, which adds all ranks' counts.
_COUNTS = ".tokens_per_expert_E"
_ONE_DEGREE = "train with one expert-parallel degree, without any_expert_degree"


def canonical_trainer(config: Any, *, accumulate: torch.dtype | None = None, any_expert_degree: bool = False) -> Any:
    """Builds a trainer of torchtitan whose weights do not depend on how many data-parallel ranks train them.

    FSDP2's reductions, or those of graph_trainer's graph, become :func:`~graphpasses.canonical_reductions`; a rank's
    microbatches are added in the same tree, the norm of the gradients is
    :func:`~graphpasses.canonical_clip_grad_norm_`'s, and microbatch ``k`` of each global batch goes to rank
    ``k % num_ranks``: every rank reads the whole data set, and keeps its own. ``training.global_batch_size`` and
    ``local_batch_size`` must be the same on all clusters. Checkpoints, data included, go on with other numbers of
    ranks. The logged loss is each cluster's own sum. How weights are initialized may depend on the mesh (on a CPU it
    does): begin with torchtitan's ``checkpoint.create_seed_checkpoint``.

    Args:
        config: of ``Trainer``, or of ``GraphTrainer`` with ``compile.pass_pipeline graphpasses``.
        accumulate: dtype in which contributions are added; None: ``training.mixed_precision_reduce``.
        any_expert_degree: whether weights do not depend on the expert-parallel degree either. An expert then computes
            the tokens of each rank that shares it by themselves, in more and smaller products, added in bfloat16.

    Returns:
        The trainer: call ``train()``.

    Raises:
        UnsupportedError: the trainer uses tensor, pipeline or context parallelism, another pass pipeline or
            graph_trainer on one rank, an optimizer whose bits depend on a shard's place, or experts that get tokens
            by kernels of their own; experts cannot have the same bits at any degree, as they round otherwise; see
            also :func:`~graphpasses.canonical_reductions`.

    Example, on the command line::

        torchrun … -m graphpasses.commands.train_torchtitan --canonical --module llama3 --config …
    """
    if config.checkpoint.create_seed_checkpoint:  # which trains nothing, and shards nothing
        return config.build()
    _check_degrees(config)
    loader = config.dataloader
    config.dataloader = _Dealt(dataset=loader.dataset, dataset_path=loader.dataset_path, loader=loader)
    trainer = config.build()
    (model,) = trainer.model_parts
    check_experts(model)
    setattr(trainer, ACCUMULATE, accumulate)
    if any_expert_degree:
        _check_overlap(config)
        compute_microbatches_apart(model, config.training, accumulate)
    if isinstance(trainer, GraphTrainer):
        _check_graph_trainer(trainer)
    else:
        canonical_reductions(model, accumulate=accumulate)
    for optimizer in trainer.optimizers:
        check_canonical_update(optimizer)
    _Steps(trainer, accumulate)
    return trainer


def _check_degrees(config: Any) -> None:
    for name in _DEGREES:
        if (size := getattr(config.parallelism, f"{name}_parallel_degree")) > 1:
            instead = ", or run the stages by torch's schedules: see docs/any_cluster.md" * (name == "pipeline")
            raise UnsupportedError(
                f"--parallelism.{name}_parallel_degree is {size}, and torchtitan's trainers have the same bits on "
                f"any number of ranks with FSDP, HSDP and expert parallelism alone. Set it to 1{instead}"
            )


def _check_graph_trainer(trainer: Any) -> None:
    if (name := trainer.config.compile.pass_pipeline) not in (PIPELINE, FUSED):
        raise UnsupportedError(
            f"--compile.pass_pipeline {name!r} reduces in NCCL's order; use --compile.pass_pipeline {PIPELINE}"
        )
    if trainer.parallel_dims.dp_shard == 1:
        raise UnsupportedError(
            "graph_trainer shards over one rank, and then neither casts nor reduces gradients as on several. Train "
            "eagerly on one rank, or shard over more (--parallelism.data_parallel_shard_degree)"
        )


def _check_overlap(config: Any) -> None:
    overlap = getattr(config.compile, "ep_overlap", None)
    if overlap is not None and overlap.enabled:
        raise UnsupportedError(
            "--compile.ep_overlap.enabled lets experts compute a microbatch in halves, which they do not on ranks "
            f"that have all experts. Leave it out, or {_ONE_DEGREE}"
        )


def check_experts(model: nn.Module) -> None:
    """Raises where experts get their tokens by kernels that may add in an order of their own."""
    for name, each in _routed(model):
        dispatcher = type(each.token_dispatcher)
        if dispatcher not in (LocalTokenDispatcher, AllToAllTokenDispatcher):
            raise UnsupportedError(
                f"{name!r} sends tokens to experts by {dispatcher.__name__}, whose bits were not compared on several "
                "numbers of ranks. Take moe_comm_backend 'standard', which is AllToAllTokenDispatcher"
            )


def compute_microbatches_apart(model: nn.Module, training: Any, accumulate: torch.dtype | None) -> None:
    """Lets the experts of a model compute what each rank sends them by itself, as ranks with all experts do.

    With expert parallelism an expert gets the tokens of several ranks' microbatches, and one matrix product adds up
    its gradient over all of them. Here there is a product for each rank, and their gradients are added in the tree of
    :func:`~graphpasses.canonical_reductions`, in the dtype of the weights. Raises UnsupportedError where these are
    added in another dtype, or experts compute in a way of their own.
    """
    compute, reduce = (TORCH_DTYPE_MAP[getattr(training, f"mixed_precision_{name}")] for name in ("param", "reduce"))
    added = accumulate or reduce
    if not compute == added == torch.bfloat16:
        raise UnsupportedError(
            f"experts compute in torch.bfloat16, and ranks' gradients are added in {added} of weights in {compute}: "
            "those of ranks that share experts would be rounded otherwise. Set training.mixed_precision_param and "
            "training.mixed_precision_reduce to 'bfloat16' in the configuration (torchtitan's command line knows "
            f"float32 alone for the latter; --any-expert-degree sets it) and leave out accumulate=, or {_ONE_DEGREE}"
        )
    for name, each in _routed(model):
        if not has_torchtitans_products(each.inner_experts):
            raise UnsupportedError(
                f"{name!r} has experts of {type(each.inner_experts).__name__}, whose products by rank are not known: "
                + _ONE_DEGREE
            )
    for _, each in _routed(model):
        if getattr(each.token_dispatcher, "ep_mesh", None) is not None:
            ProductsByRank(each)


def _routed(model: nn.Module) -> list[tuple[str, RoutedExperts]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, RoutedExperts)]


class _Steps:
    """Replaces what a trainer calls in each step: gradients are added in the tree, and clipped by its norm."""

    def __init__(self, trainer: Any, accumulate: torch.dtype | None) -> None:
        self._model = trainer.model_parts[0]
        self._added = accumulate or TORCH_DTYPE_MAP[trainer.config.training.mixed_precision_reduce]
        self._is_graph = isinstance(trainer, GraphTrainer)
        self._tree: MicrobatchTree | None = None
        self._forward_backward_step, self._train_step = trainer.forward_backward_step, trainer.train_step
        trainer.forward_backward_step, trainer.train_step = self.forward_backward_step, self.train_step

    def forward_backward_step(self, **inputs: Any) -> Any:
        """Runs a microbatch, and takes its gradients."""
        loss = self._forward_backward_step(**inputs)
        if self._tree is None:
            self._tree = self._new_tree()
        self._tree.add()
        return loss

    def train_step(self, batches: Any) -> Any:
        """Runs a step; torchtitan clips, once, when all microbatches have run."""
        self._tree = None
        with mock.patch.object(dist_utils, "clip_grad_norm_", self._clip):
            return self._train_step(batches)

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, **_: Any) -> Tensor:
        assert self._tree is not None
        self._tree.finish()
        return canonical_clip_grad_norm_(parameters, max_norm)

    def _new_tree(self) -> MicrobatchTree:
        counts = [fqn for fqn, _ in self._model.named_buffers() if fqn.endswith(_COUNTS)]
        if not self._is_graph:
            return MicrobatchTree(self._model, counts=counts)
        trained = (each for each in self._model.named_parameters() if each[1].requires_grad)
        return MicrobatchTree(self._model, ((fqn, each, self._added) for fqn, each in trained), counts)


@dataclass(kw_only=True, slots=True)
class _Dealt(BaseDataLoader.Config):  # type: ignore[misc]
    """Builds a loader of a rank's microbatches."""

    loader: Any = None

    def build(
        self, *, dp_world_size: int, dp_rank: int, snapshot_every_n_steps: int | None = None, **options: Any
    ) -> _DealtLoader:
        """Builds the whole data's loader, as one rank's."""
        every = None if snapshot_every_n_steps is None else snapshot_every_n_steps * dp_world_size
        whole = self.loader.build(dp_world_size=1, dp_rank=0, snapshot_every_n_steps=every, **options)
        return _DealtLoader(whole, dp_rank, dp_world_size)


class _DealtLoader:
    """Deals the microbatches of a loader: each of ``num_ranks`` in turn has one. Its state is that of the whole."""

    def __init__(self, whole: Any, rank: int, num_ranks: int) -> None:
        self._whole, self._rank, self._num_ranks = whole, rank, num_ranks

    def __iter__(self) -> Iterator[Any]:
        dealt = iter(self._whole)
        for together in zip(*[dealt] * self._num_ranks, strict=False):
            yield together[self._rank]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._whole.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole.load_state_dict(state)
