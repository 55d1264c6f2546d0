"""Every patch of TorchRec: what keeps Dynamo from tracing it whole and right.

Patches are in place while a compiled model is called: see ``tracing_scope``. What is not traced meanwhile, in other
threads, too, does what it did before, except for the check of the order of features.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphpasses._torch.patching import Patch, PatchSet, constant, traced
from graphpasses.embedding.torchrec.eager_parts import (
    begun_by_pipeline,
    embeddings_by_steps,
    graphpasses_decides_by_steps,
    lookup_by_steps,
    managed_collisions,
)
from graphpasses.embedding.torchrec.input_dists import check_key_order, make_input_dist
from graphpasses.embedding.torchrec.traced_comms import (
    all_to_all_single,
    carried,
    carry_codecs,
    check_codecs,
    reduce_as_eager,
)
from graphpasses.embedding.torchrec.traced_dists import TRACED_DISTS
from graphpasses.errors import UnsupportedError
from graphpasses.ops.permute_batches import PERMUTE_BATCHES, permute_sequences

TORCHREC_VERSIONS = ("1.8.0", "1.9.2")


# ---- Python that Dynamo does not know ------------------------------------------------------------------


@traced
def _without_walrus(original: Callable[..., Any], self: Any) -> list[Any]:
    """The original assigns with := in a list comprehension, at which Dynamo breaks the graph."""
    modules = [module for module in self._emb_modules if hasattr(module, "get_rs_awaitable")]
    awaitables = [module.get_rs_awaitable() for module in modules]
    return [awaitable for awaitable in awaitables if awaitable is not None]


@traced
def _without_cast(original: Callable[..., Any], self: Any, sparse_features: Any) -> Any:
    """The original calls ``cast(Awaitable[KeyedJaggedTensor], ...)``; Dynamo knows no subscripted types."""
    from torchrec.distributed.types import NoWait

    return NoWait(NoWait(sparse_features))


def _waited(value: Any) -> Any:
    from torchrec.distributed.types import LazyAwaitable

    if type(value) in (list, tuple):
        return type(value)([_waited(each) for each in value])
    return LazyAwaitable._wait_async(value)


@traced
def _with_plain_lists(
    original: Callable[..., Any], cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """The original gives torch.fx's immutable lists to torch's functions, which Dynamo has no node for."""
    return func(*_waited(args), **{name: _waited(each) for name, each in (kwargs or {}).items()})


@traced
def _on_copies(
    original: Callable[..., Any],
    self: Any,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The original's bounds check corrects ids in place, in slices that AOTAutograd cannot write back."""
    self.graphpasses_load_steps()
    weights = None if per_sample_weights is None else per_sample_weights.clone()
    return original(self, indices.clone(), offsets, weights, *args, **kwargs)


@traced
def _without_caches(original: Callable[..., Any], features: Any, keys: list[str] | None = None) -> Any:
    """An unsharded collection caches in its batch what it computes; in a copy of it, this stays in the graph."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    features = original(features, keys)
    if features.variable_stride_per_key():
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=features.stride(),
        inverse_indices=features.inverse_indices_or_none(),
    )


@traced
def _with_dims_on_host(
    original: Callable[..., Any],
    self: Any,
    offsets: Tensor,
    batch_size_per_feature_per_rank: list[list[int]] | None,
    *outputs: Any,
    **named: Any,
) -> Any:
    """The original moves the tables' dims to the CPU in each forward, and sets them as an attribute of the module."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import generate_vbe_metadata

    if batch_size_per_feature_per_rank is not None or self.feature_dims.device.type != "cpu":
        return original(self, offsets, batch_size_per_feature_per_rank, *outputs, **named)
    known = self.pooling_mode, self.feature_dims, self.current_device
    return generate_vbe_metadata(offsets, None, *known, *outputs, **named)


@constant
def graphpasses_load_steps(self: Any) -> None:
    """In its first eager forward a TBE takes the number of steps that was loaded to the host."""
    if hasattr(self, "iter") and self.iter_cpu.item() == 0:
        self.iter_cpu.copy_(self.iter)


@traced
def _silent(original: Callable[..., Any], self: Any, msg: str) -> None:
    """Dynamo breaks the graph at logger calls."""


# ---- batch sizes that differ between ranks -------------------------------------------------------------
# A graph does not know the batch sizes of other ranks. Traced, TorchRec either compares them, at which tracing ends,
# or takes them to be equal, which gives wrong results where a rank's last batch is smaller.


@traced
def _permute_received(
    original: Callable[..., Any],
    keys: list[str],
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int = 1,
) -> Any:
    """The original, traced, permutes received features as if every rank's batch had rank 0's size."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if variable_stride_per_key or stride_per_rank is None:
        return original(keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger)
    if recat is not None and (len(keys) > 1 or stagger > 1):  # one feature lies as it came, rank by rank
        tensors = PERMUTE_BATCHES(tensors, recat, stride_per_rank, False)
    return KeyedJaggedTensor(
        keys=keys,
        values=tensors[1],
        weights=tensors[2] if len(tensors) == 3 else None,
        lengths=tensors[0],
        stride=sum(stride_per_rank),
    )  # eager also computes how many ids each feature has; here whoever asks does


@traced
def _two_collectives(original: Callable[..., Any], self: Any, local_embs: Tensor, sharding_ctx: Any = None) -> Any:
    """The original asks for ``len(set(batch_size_per_rank))``."""
    if sharding_ctx is None or sharding_ctx.variable_batch_per_feature:
        return original(self, local_embs, sharding_ctx)
    num_local_ranks = self._intra_pg.size()
    by_local_rank, sums = self._preprocess_batch_size_per_rank(
        num_local_ranks, self._cross_pg.size(), sharding_ctx.batch_size_per_rank
    )
    reduced = self._intra_dist(local_embs, input_splits=sums).wait()
    return self._cross_dist(reduced, batch_size_per_rank=by_local_rank[self._rank % num_local_ranks])


@traced
def _permute_sequences(
    original: Callable[..., Any],
    self: Any,
    local_embs: Tensor,
    lengths: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    unbucketize_permute_tensor: Tensor | None = None,
    batch_size_per_rank: list[int] | None = None,
    sparse_features_recat: Tensor | None = None,
) -> Any:
    """The original asks for ``len(set(batch_size_per_rank))``, and permutes with or without a derivative by it."""
    if sparse_features_recat is not None:
        assert batch_size_per_rank is not None
        local_embs = permute_sequences(local_embs, lengths.view(-1), sparse_features_recat, batch_size_per_rank)
    # Without lengths the original permutes nothing more.
    no_lengths = lengths.new_empty(0)
    return original(self, local_embs, no_lengths, input_splits, output_splits, unbucketize_permute_tensor, None, None)


@traced
def _flatten_sequences(original: Callable[..., Any], pg: Any, a2ai: Any, sharded_input_embeddings: Tensor) -> Any:
    """The original flattens embeddings only where it permutes them; and see ``carry_codecs``."""
    return carried(original, pg, a2ai, sharded_input_embeddings.view(-1))


# ---- order of columns ----------------------------------------------------------------------------------


@constant
def graphpasses_columns(self: Any) -> tuple[list[int], list[int]]:
    """The widths and the order of columns, which never change."""
    return self._offset_dim_list.diff().tolist(), self._permute.tolist()


@traced
def _permute_columns(original: Callable[..., Any], self: Any, pooled_embs: Tensor) -> Tensor:
    """The original takes the order of columns from a tensor; as numbers, passes see it."""
    widths, order = self.graphpasses_columns()
    parts = torch.split_with_sizes(pooled_embs, widths, 1)
    return torch.cat([parts[index] for index in order], 1)


# ---- order of features ---------------------------------------------------------------------------------


@constant
def graphpasses_check_features(self: nn.Module, keys: tuple[str, ...]) -> None:
    """See :func:`check_key_order`."""
    check_key_order(self, keys)


@constant
def graphpasses_make_input_dist(
    self: nn.Module, keys: tuple[str, ...], inverse_keys: tuple[str, ...] | None, device: torch.device | None
) -> None:
    """In a first call a sharded collection makes its input dist and checks values, neither traceable."""
    check_codecs(self)
    make_input_dist(self, keys, inverse_keys, device)


def _with_checked_features(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original takes features by position and does not look at their names. Dynamo guards the names."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        keys = tuple(features.keys())
        self.graphpasses_check_features(keys)
        if torch.compiler.is_dynamo_compiling():
            inverse, device = None, None
            is_keyed = isinstance(features, KeyedJaggedTensor)  # or a TensorDict
            if is_keyed and features.variable_stride_per_key():
                names, indices = features.inverse_indices()
                inverse, device = tuple(names), indices.device
            self.graphpasses_make_input_dist(keys, inverse, device)
        return original(self, ctx, features)

    return input_dist


# ---- the patches ---------------------------------------------------------------------------------------


def _check_version() -> None:
    version = importlib.metadata.version("torchrec").partition("+")[0]
    if version not in TORCHREC_VERSIONS:
        raise UnsupportedError(
            f"TorchRec {version} was not tested with graphpasses, which traces it with patches; "
            f"install torchrec {' or '.join(TORCHREC_VERSIONS)}"
        )


_DIST = "torchrec.distributed"
_TBE = "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
_PERMUTE = "fbgemm_gpu.permute_pooled_embedding_modules_split:PermutePooledEmbeddingsSplit"
TORCHREC_PATCHES = PatchSet(
    Patch(f"{_DIST}.embedding_lookup:GroupedPooledEmbeddingsLookup.get_resize_awaitables", _without_walrus),
    Patch(f"{_DIST}.embedding_lookup:GroupedEmbeddingsLookup.get_resize_awaitables", _without_walrus),
    Patch(f"{_DIST}.sharding.dp_sharding:DpSparseFeaturesDist.forward", _without_cast),
    Patch(f"{_DIST}.types:LazyAwaitable.__torch_function__", _with_plain_lists),
    Patch(f"{_DIST}.mc_embedding_modules:BaseShardedManagedCollisionEmbeddingCollection.forward", managed_collisions),
    Patch(f"{_TBE}.graphpasses_load_steps", graphpasses_load_steps),
    Patch(f"{_TBE}.prepare_inputs", _on_copies),
    Patch(f"{_TBE}._generate_vbe_metadata", _with_dims_on_host),
    Patch(f"{_TBE}.forward", lookup_by_steps),
    Patch(f"{_TBE}.log", _silent),
    Patch("torchrec.sparse.jagged_tensor:KeyedJaggedTensor.dist_init", _permute_received),
    Patch("torchrec.modules.embedding_modules:maybe_td_to_kjt", _without_caches),
    Patch(f"{_DIST}.sharding.twrw_sharding:TwRwPooledEmbeddingDist.forward", _two_collectives),
    Patch(f"{_DIST}.sharding.grid_sharding:GridPooledEmbeddingDist.forward", _two_collectives),
    Patch(f"{_PERMUTE}.graphpasses_columns", graphpasses_columns),
    Patch(f"{_PERMUTE}.forward", _permute_columns),
    Patch(f"{_DIST}.dist_data:SequenceEmbeddingsAllToAll.forward", _permute_sequences),
    Patch(f"{_DIST}.comm_ops:all2all_sequence_sync", _flatten_sequences),
    Patch(f"{_DIST}.comm_ops:all2all_pooled_sync", carry_codecs),
    Patch(f"{_DIST}.comm_ops:variable_batch_all2all_pooled_sync", carry_codecs),
    Patch(f"{_DIST}.comm_ops:AllToAllSingle", all_to_all_single),
    Patch(f"{_DIST}.comm_ops:reduce_scatter_v_sync", reduce_as_eager),
    *TRACED_DISTS,
    *(
        Patch(f"{_DIST}.train_pipeline.runtime_forwards:{name}.__call__", begun_by_pipeline)
        for name in ("PipelinedForward", "EmbeddingPipelinedForward", "PrefetchPipelinedForward")
    ),
    *(
        Patch(f"{_DIST}.{module}.{name}", wrap)
        for module in ("embeddingbag:ShardedEmbeddingBagCollection", "embedding:ShardedEmbeddingCollection")
        for name, wrap in (
            ("forward", embeddings_by_steps),
            ("graphpasses_decides_by_steps", graphpasses_decides_by_steps),
            ("graphpasses_check_features", graphpasses_check_features),
            ("graphpasses_make_input_dist", graphpasses_make_input_dist),
            ("input_dist", _with_checked_features),
        )
    ),
    check=_check_version,
)
