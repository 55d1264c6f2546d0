"""What keeps TorchRec and DDP from being traced as one graph, and the patch for each.

Tested with torchrec 1.8.0. Outside tracing a patched function does what the original does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses.embedding.collectives import ReduceScatterV
from graphpasses.errors import KeyOrderError, UnsupportedError

__all__ = ["Patch", "apply_patches", "check_key_order", "patches", "remove_patches"]

_TESTED = ("1.8.0",)


@dataclass(frozen=True)
class Patch:
    """One attribute of a class or module, and what replaces it while a model is traced.

    Args:
        owner: class or module.
        name: its attribute.
        replacement: the new value.
    """

    owner: Any
    name: str
    replacement: Any

    @classmethod
    def of(cls, owner: Any, name: str, wrap: Callable[[Any], Any]) -> Patch:
        """Returns the patch that puts ``wrap(original)`` in place of the original."""
        original = vars(owner)[name]
        replacement = wraps(original)(wrap(original))
        return cls(owner, name, type(original)(replacement) if isinstance(original, staticmethod) else replacement)


def _call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.module(*args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _without_walrus(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_resize_awaitables(self: Any) -> list[Any]:
        modules = [module for module in self._emb_modules if hasattr(module, "get_rs_awaitable")]
        awaitables = [module.get_rs_awaitable() for module in modules]
        return [awaitable for awaitable in awaitables if awaitable is not None]

    return get_resize_awaitables


def check_key_order(module: nn.Module, keys: Sequence[str]) -> None:
    if module._has_uninitialized_input_dist:
        return
    shardings = (
        module._embedding_shardings
        if hasattr(module, "_embedding_shardings")
        else list(module._sharding_type_to_sharding.values())
    )
    expected = [name for sharding in shardings for name in sharding.feature_names()]
    order = module._features_order or list(range(len(expected)))
    given = [keys[i] if i < len(keys) else None for i in order]
    if given != expected:
        _refuse_keys(module._module_fqn, order, expected, keys)


def _refuse_keys(fqn: str, order: Sequence[int], expected: Sequence[str], given: Sequence[str]) -> None:
    raise KeyOrderError(f"{fqn} {order} {expected} {given}")


def _with_key_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        check_key_order(self, features.keys())
        return original(self, ctx, features)

    return input_dist


def _data_parallel_input(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, sparse_features: Any) -> Any:
        from torchrec.distributed.types import NoWait

        return NoWait(NoWait(sparse_features))

    return forward


# ---- batch sizes that differ between ranks -------------------------------------------------------------


def _recat_any_batch_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_recat(
        local_split: int,
        num_splits: int,
        stagger: int = 1,
        device: torch.device | None = None,
        batch_size_per_rank: list[int] | None = None,
    ) -> Tensor | None:
        if not torch.compiler.is_dynamo_compiling():
            return original(local_split, num_splits, stagger, device, batch_size_per_rank)
        recat = original(local_split, num_splits, stagger, device)
        if recat is None or batch_size_per_rank is None:
            return recat
        batch_sizes = torch.tensor(batch_size_per_rank, dtype=torch.int32, device=device)
        batch_sizes = batch_sizes.view(-1, 1).expand(-1, local_split).reshape(-1)
        return torch.ops.fbgemm.expand_into_jagged_permute(
            recat,
            torch.ops.fbgemm.asynchronous_complete_cumsum(batch_sizes),
            torch.ops.fbgemm.asynchronous_complete_cumsum(batch_sizes[recat]),
            sum(batch_size_per_rank) * local_split,
        )

    return _get_recat


def _dist_init_any_batch_sizes(original: Any) -> Any:
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> Any:
        if variable_stride_per_key or not torch.compiler.is_dynamo_compiling():
            return original.__func__(
                keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
            )
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths, values = tensors[:2]
        weights = tensors[2] if len(tensors) > 2 else None
        if recat is not None:
            lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
                recat, lengths.view(-1), values, weights, values.numel()
            )
        return KeyedJaggedTensor(
            keys=keys, values=values, weights=weights, lengths=lengths, stride=sum(stride_per_rank)
        ).sync()

    return dist_init


def _two_step_any_batch_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, local_embs: Tensor, sharding_ctx: Any = None) -> Any:
        if (
            sharding_ctx is None
            or sharding_ctx.variable_batch_per_feature
            or not torch.compiler.is_dynamo_compiling()
        ):
            return original(self, local_embs, sharding_ctx)
        num_local = self._intra_pg.size()
        by_local_rank, sums = self._preprocess_batch_size_per_rank(
            num_local, self._cross_pg.size(), sharding_ctx.batch_size_per_rank
        )
        reduced = self._intra_dist(local_embs, input_splits=sums).wait()
        return self._cross_dist(reduced, batch_size_per_rank=by_local_rank[self._rank % num_local])

    return forward


class _PermuteSegments(torch.autograd.Function):
    """fbgemm::permute_1D_sparse_data of floats, which FBGEMM itself does not differentiate."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor, permute: Tensor) -> Tensor:
        lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
            permute, lengths, values, None, values.numel()
        )
        ctx.save_for_backward(lengths, permute)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        lengths, permute = ctx.saved_tensors
        inverse = torch.ops.fbgemm.invert_permute(permute)
        _, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
            inverse, lengths, gradient, None, gradient.numel()
        )
        return values, None, None


def _sequences_any_batch_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: list[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> Any:
        # Tracing cannot compare batch sizes; it permutes as if they differed, see below.
        if torch.compiler.is_dynamo_compiling():
            batch_size_per_rank = None
        return original(
            self,
            local_embs,
            lengths,
            input_splits,
            output_splits,
            unbucketize_permute_tensor,
            batch_size_per_rank,
            sparse_features_recat,
        )

    return forward


def _permute_any_batch_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def all2all_sequence_sync(pg: Any, a2ai: Any, embeddings: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            lengths = a2ai.lengths_after_sparse_data_all2all.view(-1) * a2ai.embedding_dim
            embeddings = _PermuteSegments.apply(embeddings.view(-1), lengths, a2ai.forward_recat_tensor)
            # Without lengths the original permutes nothing.
            a2ai.lengths_after_sparse_data_all2all = lengths.new_empty(0)
        return original(pg, a2ai, embeddings)

    return all2all_sequence_sync


def _eager_reduction_order(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter_v_sync(pg: Any, rsi: Any, input: Tensor) -> Tensor:
        from torchrec.distributed import comm_ops

        if pg.size() <= 2 or not torch.compiler.is_dynamo_compiling():
            return original(pg, rsi, input)
        if rsi.codecs is not None:
            input = rsi.codecs.forward.encode(input)
        divisor = pg.size() if comm_ops.get_gradient_division() else 1
        output = ReduceScatterV.apply(input, rsi.input_splits, pg.rank(), comm_ops.pg_name(pg), divisor)
        return output if rsi.codecs is None else rsi.codecs.forward.decode(output)

    return reduce_scatter_v_sync


@cache
def patches(with_torchrec: bool) -> tuple[Patch, ...]:
    ddp = Patch.of(DistributedDataParallel, "forward", _call_module)
    if not with_torchrec:
        return (ddp,)
    import torchrec
    from torchrec.distributed import comm_ops, dist_data, embedding, embedding_lookup, embeddingbag
    from torchrec.distributed.sharding import dp_sharding, grid_sharding, twrw_sharding
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if torchrec.__version__ not in _TESTED:
        raise UnsupportedError(torchrec.__version__)
    return (
        ddp,
        *(
            Patch.of(owner, "get_resize_awaitables", _without_walrus)
            for owner in (
                embedding_lookup.GroupedPooledEmbeddingsLookup,
                embedding_lookup.GroupedEmbeddingsLookup,
            )
        ),
        Patch.of(dp_sharding.DpSparseFeaturesDist, "forward", _data_parallel_input),
        Patch.of(dist_data, "_get_recat", _recat_any_batch_sizes),
        Patch.of(KeyedJaggedTensor, "dist_init", _dist_init_any_batch_sizes),
        Patch.of(twrw_sharding.TwRwPooledEmbeddingDist, "forward", _two_step_any_batch_sizes),
        Patch.of(grid_sharding.GridPooledEmbeddingDist, "forward", _two_step_any_batch_sizes),
        Patch.of(dist_data.SequenceEmbeddingsAllToAll, "forward", _sequences_any_batch_sizes),
        Patch.of(comm_ops, "all2all_sequence_sync", _permute_any_batch_sizes),
        Patch.of(comm_ops, "reduce_scatter_v_sync", _eager_reduction_order),
        Patch.of(embedding.ShardedEmbeddingCollection, "input_dist", _with_key_check),
        Patch.of(embeddingbag.ShardedEmbeddingBagCollection, "input_dist", _with_key_check),
    )


_lock = threading.Lock()
_originals: list[tuple[Patch, Any]] = []
_depth = 0


def apply_patches() -> None:
    global _depth
    todo = patches("torchrec" in sys.modules)
    with _lock:
        _depth += 1
        if _depth == 1:
            for patch in todo:
                _originals.append((patch, vars(patch.owner)[patch.name]))
                setattr(patch.owner, patch.name, patch.replacement)


def remove_patches() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            while _originals:
                patch, original = _originals.pop()
                setattr(patch.owner, patch.name, original)
