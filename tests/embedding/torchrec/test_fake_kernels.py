"""Fake kernels against the CPU kernels they stand for, op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("fbgemm_gpu")

from graphpasses._torch.schemas import TracingKernels, operator_names
from graphpasses.embedding.torchrec.fake_kernels import _is_lacking, fake_kernels

with fake_kernels() as REGISTERED:
    import fbgemm_gpu.quantize  # noqa: F401  # defines two more operators, once TorchRec's codecs are imported

INFERENCE = "inference or preprocessing, outside a training step"
INNER = "runs inside a wrapper that has a fake kernel; some schemas do not say what they write"
VALUES = "eager differentiates through the kernel, and shape and gradient follow the values of permute_list"
LEFT_OUT = {
    "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax": INFERENCE,
    "FloatToFused8BitRowwiseQuantizedOut": INFERENCE,
    "Fused8BitRowwiseQuantizedToFloatOut": INFERENCE,
    "bottom_k_per_row": INFERENCE,
    "dequantize_mx": "communication in MX4, which no traced collective can do",
    "direct_mapped_lru_cache_populate_byte": INFERENCE,
    "direct_mapped_lxu_cache_lookup": INFERENCE,
    "embedding_bag_rowwise_prune": INFERENCE,
    "histogram_binning_calibration_by_feature": INFERENCE,
    "int_nbit_split_embedding_uvm_caching_codegen_lookup_function": INFERENCE,
    "lengths_range_out": INFERENCE,
    "lfu_cache_populate_byte": INFERENCE,
    "linearize_cache_indices_from_row_idx": INFERENCE,
    "lru_cache_populate_byte": INFERENCE,
    "padding_fused_tbe_input_combine": INFERENCE,
    "padding_fused_tbe_input_combine_with_length": INFERENCE,
    "permute102_baddbmm_permute102": "a dense layer that TorchRec does not use; its kernel hides its gradient",
    "permute_duplicate_pooled_embs": VALUES,
    "permute_duplicate_pooled_embs_auto_grad": VALUES,
    "permute_duplicate_pooled_embs_auto_grad_split": VALUES,
    "permute_duplicate_pooled_embs_split": VALUES,
    "pruned_hashmap_insert": INFERENCE,
    "pruned_hashmap_lookup": INFERENCE,
    "quantize_mx": "communication in MX4, which no traced collective can do",
    "split_embedding_backward_codegen_adagrad_cpu": INNER,
    "split_embedding_backward_codegen_rowwise_adagrad_cpu": INNER,
    "split_embedding_backward_codegen_rowwise_adagrad_with_counter_cpu": INNER,
    "split_embedding_backward_codegen_rowwise_rmsprop_ar_cpu": INNER,
    "split_embedding_backward_codegen_sgd_cpu": INNER,
    "split_embedding_nobag_backward_codegen_adagrad_cpu": INNER,
    "split_embedding_nobag_backward_codegen_rowwise_adagrad_cpu": INNER,
    "split_embedding_nobag_backward_codegen_rowwise_adagrad_with_counter_cpu": INNER,
    "split_embedding_nobag_backward_codegen_rowwise_rmsprop_ar_cpu": INNER,
    "split_embedding_nobag_backward_codegen_sgd_cpu": INNER,
    "split_embedding_nobag_codegen_forward_cpu": INNER,
}
# FBGEMM 1.9 says what these write, and brings fake kernels, which take no symbolic sizes, for the others.
if IS_1_9 := "fbgemm::get_unique_indices" not in REGISTERED:
    LEFT_OUT |= {"emb_inplace_update": INFERENCE, "pruned_array_lookup_from_row_idx": INFERENCE}
OF_FBGEMM = {"get_unique_indices", "get_unique_indices_with_inverse"} if IS_1_9 else set()


def op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.fbgemm, name.removeprefix("fbgemm::")).default


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# ---- which ops --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with fake_kernels():
        yield


def test_every_op_is_covered_or_left_out_on_purpose() -> None:
    assert {f"fbgemm::{name}" for name in LEFT_OUT} == set(filter(_is_lacking, operator_names("fbgemm")))
    assert len(REGISTERED) + len(LEFT_OUT) + len(OF_FBGEMM) == (93 if IS_1_9 else 91)


def test_it_registers_once_and_only_what_is_missing() -> None:
    kernels = {name: torch._library.simple_registry.singleton.find(name).fake_impl.kernels for name in REGISTERED}
    with fake_kernels() as registered:
        assert registered == REGISTERED
        assert {len(found) for found in kernels.values()} == {1}
    added = TracingKernels("fbgemm")
    with pytest.raises(RuntimeError, match="already has a DispatchKey::Meta implementation"):
        added.add_fake("fbgemm::permute_pooled_embs", print)
    with pytest.raises(RuntimeError, match="already has a fake impl"):
        added.add_fake("fbgemm::permute_2D_sparse_data", print)


# ---- real against fake ------------------------------------------------------------------------------


def table_arguments(name: str, **given: Any) -> dict[str, Any]:
    """Arguments for a TBE op: tables of 5x4 and 6x8, three samples (variable batch: three and one)."""
    variable = "_vbe" in name
    nobag = "_nobag" in name
    rank_batches = torch.tensor([[0, 3], [0, 1]], dtype=torch.int32)
    placements, table_offsets, none = ints(0, 0, dtype=torch.int32), ints(0, 20), torch.empty(0)
    is_packed = any(str(argument.type) == "List[Tensor]" for argument in op(name)._schema.arguments)  # 1.9
    known = {
        "grad_output": torch.randn((20,) if variable else (8, 4) if nobag else (3, 12)),
        "host_weights": torch.randn(68),
        "dev_weights": torch.randn(68) if name.startswith("fbgemm::dense") else torch.empty(0),
        "weights": [torch.randn(68), placements, table_offsets] if is_packed else torch.randn(68),
        "aux_tensor_bwd": [none, none, none, none, rank_batches] if variable else [none],
        "D_offsets": ints(0, 4, 12, dtype=torch.int32),
        "D": 4,
        "total_D": 12,
        "max_D": 8,
        "mixed_D": True,
        "hash_size_cumsum": ints(0, 5, 11),
        "total_hash_size_bits": 4,
        "indices": ints(0, 4, 1, 2, 3, 5, 0, 1),
        "offsets": ints(0, 2, 2, 4, 8) if variable else ints(0, 2, 2, 4, 5, 7, 8),
        "pooling_mode": 0,
        "indice_weights": torch.rand(8) if "_weighted" in name else None,
        "feature_requires_grad": ints(1, 1, dtype=torch.int32),
        "learning_rate_tensor": torch.tensor(0.1),
        "max_counter": 1.0,
        "output_dtype": 0,
        "info_B_num_bits": 26,
        "info_B_mask_int64": 2**26 - 1,
        "BT_block_size": 1,
        "max_segment_length_per_warp": 32,
        "max_B": 3,
        "vbe_output_size": 20,
        "vbe_B_offsets_rank_per_feature": rank_batches,
        "vbe_output_offsets_feature_rank": ints(0, 12, 20),
        "vbe_output": None,
        **dict.fromkeys(["momentum1_host", "prev_iter_host", "row_counter_host"], torch.zeros(68)),
        **dict.fromkeys(["stochastic_rounding", "is_experimental"], False),
        **dict.fromkeys(["use_uniq_cache_locations", "use_homogeneous_placements"], False),
        **given,
    }
    by_suffix = {"_offsets": table_offsets, "_placements": placements}
    arguments = {}
    for argument in op(name)._schema.arguments:
        if argument.name in known:
            arguments[argument.name] = known[argument.name]
        elif not argument.has_default_value():
            suffix = "_" + argument.name.rpartition("_")[2]
            arguments[argument.name] = by_suffix.get(suffix, none)
    return arguments


POOLED = "split_embedding_codegen_forward_unweighted_pt2_wrapper"
SEQUENCE = "split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper"
VARIABLE = "split_embedding_codegen_forward_weighted_vbe_pt2_wrapper"
DENSE = "dense_embedding_codegen_lookup_function"

IDS = torch.arange(9)
FLOATS = torch.randn(9)
ROWS = torch.randn(9, 4)
LENGTHS = torch.tensor([[1, 2], [3, 0], [2, 1]])
PERMUTE = ints(2, 0, 2, 1, dtype=torch.int32)
BATCHES = ints(0, 2, dtype=torch.int32)

# Name and arguments; a size of the real outputs that depends on data is dynamic in the fake ones.
CASES: list[tuple[str, Sequence[Any] | dict[str, Any]]] = [
    *((name, table_arguments(name)) for name in REGISTERED if "split_embedding" in name or DENSE in name),
    *(
        (name, table_arguments(name, output_dtype=output_dtype, host_weights=torch.randn(68, dtype=dtype)))
        for name in (POOLED, SEQUENCE, VARIABLE)
        for output_dtype, dtype in ((1, torch.float32), (0, torch.float16), (2, torch.float16))
    ),
    (DENSE, table_arguments(f"fbgemm::{DENSE}", dev_weights=torch.randn(68, dtype=torch.float16))),
    ("permute_pooled_embs_auto_grad_split", (ROWS, ints(0, 1, 4), ints(1, 0), ints(0, 3, 4), ints(1, 0))),
    ("permute_sequence_embeddings", (PERMUTE, LENGTHS, FLOATS)),
    ("permute_sparse_data", (PERMUTE, LENGTHS, IDS)),
    ("permute_sparse_data", (PERMUTE, LENGTHS.int(), IDS, FLOATS, 12)),
    ("bucketize_sparse_features", (LENGTHS.view(-1), IDS, False, 2)),
    ("bucketize_sparse_features", (LENGTHS.view(-1), IDS, True, 2, FLOATS)),
    *(("get_unique_indices", (ids, 9, count)) for ids in (IDS, IDS.int()) for count in (False, True)),
    ("get_unique_indices_with_inverse", (IDS, 9, False, False)),
    ("get_unique_indices_with_inverse", (IDS, 9, True, True)),
    ("reorder_batched_ad_lengths", (ints(1, 2, 3, 4), BATCHES, 2)),
    ("reorder_batched_ad_lengths", (ints(1, 2, 3, 4), BATCHES, 2, True)),
    ("reorder_batched_ad_lengths", (ints(1, 2, 3, 4), BATCHES, 2, False, 3)),
    ("reorder_batched_ad_indices", (ints(0, 4, 9), IDS, ints(0, 4, 9), BATCHES, 2)),
    ("reorder_batched_ad_indices", (ints(0, 9), IDS, ints(0, 9, 18), BATCHES, 2, True, 18)),
    ("cat_reorder_batched_ad_indices", (ints(0, 4, 9), [IDS], ints(0, 4, 9), BATCHES, 2, False, 9)),
    ("reorder_batched_sequence_embeddings", (ints(0, 4, 9), ROWS, ints(0, 4, 9), BATCHES.long(), 2)),
    ("recat_embedding_grad_output_mixed_D", (ROWS, [3, 1])),
    ("index_select_dim0", (ROWS, IDS[:3])),
    ("jagged_index_select_2d_forward", (ROWS, ints(1, 0), ints(3, 9), ints(6, 9), 9)),
    ("jagged_index_add_2d_forward", (ROWS, ints(1, 0), ints(6, 9), ints(3, 9), 9, 9)),
    ("jagged_slice_forward", (FLOATS, ints(4, 5), ints(0, 1), ints(2, 2), ints(0, 0), 4, 2, False)),
    ("jagged_1d_to_truncated_values", (FLOATS, ints(4, 5), 2)),
    ("jagged_softmax", (ROWS, ints(0, 4, 9), 5)),
    ("jagged_dense_bmm", (ROWS, ints(0, 4, 9), torch.randn(2, 4, 3), 5)),
    ("jagged_acc_weights_and_counts", (FLOATS, IDS % 3, 3)),
    ("stacked_jagged_1d_to_dense", (FLOATS, LENGTHS, [0, 3, 6, 9], [2, 3, 1], 0)),
    ("stacked_jagged_2d_to_dense", (ROWS, LENGTHS, [0, 3, 6, 9], [2, 3, 1])),
    ("FloatToBfloat16Quantized", (ROWS.t(),)),
    ("Bfloat16QuantizedToFloat", (ROWS.bfloat16(),)),
]
CASES = [case for case in CASES if case[0] not in OF_FBGEMM]
DYNAMIC = {"permute_sequence_embeddings", "permute_sparse_data", "jagged_1d_to_truncated_values"}


def call(name: str, arguments: Any, convert: Callable[[Tensor], Tensor] = Tensor.clone) -> list[Any]:
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, convert, (args, kwargs))
    return torch.utils._pytree.tree_leaves(op(name)(*args, **kwargs))


def describe(value: Any) -> object:
    """Dtype, device, shape and strides; sizes by the value they have in the case, or None if it is unknown."""
    if value is None:
        return None
    sizes = (*value.shape, *value.stride())
    known = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return value.dtype, value.device, known


def test_every_registered_op_has_a_case() -> None:
    assert {op(name)._schema.name for name, _ in CASES} == set(REGISTERED)


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[name.removeprefix("fbgemm::") for name, _ in CASES])
def test_fake_outputs_are_like_real_ones(name: str, arguments: Any) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    # Sizes are symbols; below autograd, where `jagged_softmax` would call another op.
    with torch.inference_mode():
        real = call(name, arguments)
        with mode:
            fake = call(name, arguments, mode.from_tensor)
    assert all(value is None or isinstance(value, FakeTensor) for value in fake)
    expected = [describe(value) for value in real]
    found = [describe(value) for value in fake]
    if None in (size for one in found if one for size in one[2]):
        assert name in DYNAMIC
        assert [one and (one[:2], len(one[2])) for one in found] == [
            one and (one[:2], len(one[2])) for one in expected
        ]
    else:
        assert found == expected


# ---- in a compiled training step --------------------------------------------------------------------


def lookup(pooling_mode: int, weighted: bool) -> Callable[..., Tensor]:
    arguments = table_arguments(f"fbgemm::{DENSE}", pooling_mode=pooling_mode)

    def dense(weights: Tensor, indice_weights: Tensor) -> Tensor:
        given = {"dev_weights": weights, "indice_weights": indice_weights if weighted else None}
        return op(DENSE)(**arguments | given)

    return dense


HIDDEN: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "dense sum": (lookup(0, weighted=False), (68,)),
    "dense mean": (lookup(1, weighted=False), (68,)),
    "dense weighted": (lookup(0, weighted=True), (68,)),
    "index_select_dim0": (lambda rows, _: op("index_select_dim0")(rows, ints(3, 3, 1)), (9, 4)),
    "stacked_jagged_1d_to_dense": (
        # One key: with more, eager's backward reads offsets of the last key for all and leaves its memory.
        lambda values, _: op("stacked_jagged_1d_to_dense")(values, LENGTHS[:1], [0, 3], [2], 1),
        (3,),
    ),
    "stacked_jagged_2d_to_dense": (
        lambda values, _: op("stacked_jagged_2d_to_dense")(values, LENGTHS, [0, 3, 6, 9], [2, 3, 1], 1),
        (9, 4),
    ),
}


def gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor | None]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    outputs = torch.utils._pytree.tree_leaves(function(*leaves))
    sum((output**2).sum() for output in outputs).backward()
    return [*outputs, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_gradients_are_eager_s(case: str) -> None:
    function, shape = HIDDEN[case]
    inputs = torch.randn(shape), torch.rand(8)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        eager = gradients(function, *inputs)
    compiled = gradients(torch.compile(function, backend="aot_eager", fullgraph=True), *inputs)
    assert eager[-2] is not None
    for one, other in zip(eager, compiled, strict=True):
        assert one is other is None or torch.equal(one, other)


class Step(nn.Module):
    """A lookup of the ids that are not negative, whose number a tracer cannot know."""

    def __init__(self, optimizer: str, pooling: str) -> None:
        super().__init__()
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        torch.manual_seed(0)
        host = training.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        self.tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(5, 4, *host), (6, 4, *host)],
            optimizer=EmbOptimType[optimizer],
            pooling_mode=training.PoolingMode[pooling],
            learning_rate=0.1,
        )
        self.tables.init_embedding_weights_uniform(-1, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return (self.tables(ids[ids >= 0], offsets) ** 2).sum()


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_one_graph_with_unknown_sizes_trains_like_eager(optimizer: str, pooling: str) -> None:
    eager, other = Step(optimizer, pooling), Step(optimizer, pooling)
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True, dynamic=True)
        for ids, offsets in (
            (ints(0, -1, 4, 1, 2, 5), ints(0, 2, 3, 3, 5)),
            (ints(0, 3, 3, 1, -1, -1, 5, 0), ints(0, 2, 3, 3, 4, 6, 6)),
        ):
            # The bounds check writes ids and offsets.
            losses = [step(ids.clone(), offsets.clone()) for step in (eager, compiled)]
            assert torch.equal(*losses)
            sum(losses).backward()
    for (name, tensor), (_, same) in zip(eager.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(tensor, same), name
    assert not torch.equal(eager.tables.weights_host, Step(optimizer, pooling).tables.weights_host)
