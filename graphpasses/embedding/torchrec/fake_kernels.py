"""Fake kernels for the FBGEMM ops that have none: how their outputs' shapes follow from their inputs.

FBGEMM's CUDA build brings Meta kernels for its training ops, its CPU build (read: 1.8.0) does not.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.schemas import Rule, TracingKernels, below_autograd, has_kernel, operator_names
from graphpasses.fbgemm.names import load_fbgemm

# FBGEMM's `SparseType`, by value; its CPU lookups read any other as the dtype of the weights.
_SPARSE_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}

# What the dense lookup takes half and quantized weights to.
_DENSE_OUTPUTS = {torch.float16: torch.float32, torch.uint8: torch.float32}


def _empty(like: Tensor, *shape: int | torch.SymInt, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _dynamic_size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


# ---- lookups and updates of table-batched embeddings ---------------------------------------------------


def _batch_size(call: SimpleNamespace) -> int:
    num_features = call.D_offsets.numel() - 1
    batch_size: int = (call.offsets.numel() - 1) // num_features
    return batch_size


def _looked_up(call: SimpleNamespace, *shape: int | torch.SymInt) -> Tensor:
    dtype = _SPARSE_TYPES.get(call.output_dtype, call.host_weights.dtype)
    return _empty(call.host_weights, *shape, dtype=dtype)


def _dense_lookup(call: SimpleNamespace) -> Tensor:
    weights = call.dev_weights
    dtype = _DENSE_OUTPUTS.get(weights.dtype, weights.dtype)
    return _empty(weights, _batch_size(call), call.total_D, dtype=dtype)


# ---- pooled embeddings and sparse features -------------------------------------------------------------


def _permuted_lengths(call: SimpleNamespace) -> Tensor:
    return _empty(call.lengths, call.permute.numel(), call.lengths.size(1))


def _permuted_features(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None]:
    size = _dynamic_size() if call.permuted_lengths_sum is None else call.permuted_lengths_sum
    weights = None if call.weights is None else _empty(call.weights, size)
    return _permuted_lengths(call), _empty(call.values, size), weights


def _bucketized(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    lengths = _empty(call.lengths, call.lengths.numel() * call.my_size)
    weights = None if call.weights is None else torch.empty_like(call.weights)
    positions = torch.empty_like(call.indices) if call.bucketize_pos else None
    return lengths, torch.empty_like(call.indices), weights, positions


def _unique(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None]:
    indices = call.linear_indices
    counts = torch.empty_like(indices, dtype=torch.int32) if call.compute_count else None
    # As long as the input: the second output says how many are filled.
    return torch.empty_like(indices), _empty(indices, 1, dtype=torch.int32), counts


def _unique_with_inverse(call: SimpleNamespace) -> tuple[Tensor | None, ...]:
    inverse = call.compute_inverse_indices
    return *_unique(call), torch.empty_like(call.linear_indices, dtype=torch.int32) if inverse else None


def _reordered_lengths(call: SimpleNamespace) -> Tensor:
    lengths = call.cat_ad_lengths
    size = lengths.numel()
    if call.max_batch_size > 0:
        size = size // call.num_ads_in_batch * call.max_batch_size
    elif call.broadcast_lengths:
        size = size // (call.batch_offsets.numel() - 1) * call.num_ads_in_batch
    return _empty(lengths, size)


def _padded_by_key(call: SimpleNamespace) -> list[Tensor]:
    values, batch_size = call.values, call.lengths.size(1)
    return [_empty(values, batch_size, size, *values.shape[1:]) for size in call.max_lengths_per_key]


# Whole op names, without "fbgemm::", to rules; at most one pattern matches an op.
_RULES: dict[str, Rule] = {
    r"split_embedding_codegen_forward_(un)?weighted_pt2_wrapper": lambda call: _looked_up(
        call, _batch_size(call), call.total_D
    ),
    r"split_embedding_codegen_forward_(un)?weighted_vbe_pt2_wrapper": lambda call: _looked_up(
        call, call.vbe_output_size
    ),
    r"split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper": lambda call: _looked_up(
        call, call.indices.numel(), call.D
    ),
    # Tables and optimizer states change in place; the CPU kernels return an undefined tensor.
    r"split_embedding_(nobag_)?backward_codegen_\w+_(un)?weighted(_vbe)?_pt2_wrapper": lambda call: None,
    r"split_embedding_codegen_grad_indice_weights(_cpu|(_vbe)?_pt2_wrapper)": lambda call: torch.empty_like(
        call.indices, dtype=torch.float32
    ),
    r"dense_embedding_codegen_lookup_function": _dense_lookup,
    r"split_embedding_backward_codegen_dense_cpu": lambda call: torch.empty_like(
        call.host_weights, dtype=call.grad_output.dtype
    ),
    r"permute_pooled_embs_auto_grad_split": lambda call: torch.empty_like(call.pooled_embs),
    r"permute_sequence_embeddings": lambda call: (_permuted_lengths(call), _empty(call.embeddings, _dynamic_size())),
    r"permute_sparse_data": _permuted_features,
    r"bucketize_sparse_features": _bucketized,
    r"get_unique_indices": _unique,
    r"get_unique_indices_with_inverse": _unique_with_inverse,
    r"reorder_batched_ad_lengths": _reordered_lengths,
    r"reorder_batched_ad_indices": lambda call: _empty(
        call.cat_ad_indices,
        call.num_indices_after_broadcast if call.broadcast_indices else call.cat_ad_indices.numel(),
    ),
    r"cat_reorder_batched_ad_indices": lambda call: _empty(call.cat_ad_indices[0], call.total_num_indices),
    r"reorder_batched_sequence_embeddings": lambda call: torch.empty_like(call.cat_sequence_embeddings),
    r"recat_embedding_grad_output_mixed_D": lambda call: _empty(call.grad_output, call.grad_output.numel()),
    r"index_select_dim0": lambda call: _empty(call.input, call.indices.numel(), *call.input.shape[1:]),
    r"jagged_index_select_2d_forward": lambda call: _empty(
        call.values, call.num_dense_output_rows, call.values.size(1)
    ),
    r"jagged_index_add_2d_forward": lambda call: _empty(call.values, call.num_output_rows, call.values.size(1)),
    r"jagged_slice_forward": lambda call: _empty(call.x_values, call.num_output_rows),
    r"jagged_1d_to_truncated_values": lambda call: _empty(call.values, _dynamic_size()),
    r"jagged_softmax": lambda call: (_empty(call.values, *call.values.shape), call.x_offsets),
    r"jagged_dense_bmm": lambda call: (_empty(call.x_values, call.x_values.size(0), call.y.size(-1)), call.x_offsets),
    r"jagged_acc_weights_and_counts": lambda call: _empty(
        call.weights, call.num_unique_indices, 2, dtype=torch.float32
    ),
    r"stacked_jagged_[12]d_to_dense": _padded_by_key,
    r"FloatToBfloat16Quantized": lambda call: _empty(call.input, *call.input.shape, dtype=torch.bfloat16),
    r"Bfloat16QuantizedToFloat": lambda call: _empty(call.input, *call.input.shape, dtype=torch.float32),
}


# ---- gradients that CPU kernels hide: autograd runs inside the kernel, where a tracer does not look -----
# Each is made of the same kernels that eager's forward and backward run, so results keep eager's bits.

# The arguments of a lookup that kernels read for the gradient of its table, and of the weights of its indices.
_READ_FOR_TABLE = attrgetter(
    *("weights_offsets", "D_offsets", "max_D", "hash_size_cumsum", "total_hash_size_bits"),
    *("indices", "offsets", "pooling_mode", "indice_weights"),
)
_READ_FOR_WEIGHTS = attrgetter(
    *("dev_weights", "weights_offsets", "D_offsets", "indices", "offsets", "feature_requires_grad")
)


class _DenseLookup(torch.autograd.Function):
    """Pooled lookup whose gradient is a whole table, as data-parallel tables need it."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, indice_weights: Tensor | None, call: SimpleNamespace) -> Tensor:
        ctx.call = call
        with below_autograd():
            output: Tensor = torch.ops.fbgemm.dense_embedding_codegen_lookup_function(**vars(call))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), call = grad_outputs, ctx.call
        weights_gradient = indice_weights_gradient = None
        if ctx.needs_input_grad[0]:
            # FBGEMM declares that it writes the table, of which it reads only the shape: one number stands in for it,
            # so that functionalization does not copy the table.
            table = call.dev_weights.new_zeros(()).expand_as(call.dev_weights)
            weights_gradient = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
                grad, table, *_READ_FOR_TABLE(call)
            )
        if ctx.needs_input_grad[1]:
            indice_weights_gradient = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
                grad, *_READ_FOR_WEIGHTS(call)
            )
        return weights_gradient, indice_weights_gradient, None


def _traced_dense_lookup(call: SimpleNamespace) -> Tensor:
    apply: Callable[..., Tensor] = _DenseLookup.apply
    return apply(call.dev_weights, call.indice_weights, call)


def _traced_padded_by_key(call: SimpleNamespace) -> list[Tensor]:
    return [
        torch.ops.fbgemm.jagged_to_padded_dense(
            call.values[start:stop],
            [torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)],
            [max_length],
            float(call.padding_value),
        )
        for lengths, (start, stop), max_length in zip(
            call.lengths, pairwise(call.offset_per_key), call.max_lengths_per_key, strict=True
        )
    ]


_TRACED_GRADIENTS: dict[str, Rule] = {
    "fbgemm::dense_embedding_codegen_lookup_function": _traced_dense_lookup,
    "fbgemm::index_select_dim0": lambda call: torch.index_select(call.input, 0, call.indices),
    "fbgemm::stacked_jagged_1d_to_dense": _traced_padded_by_key,
    "fbgemm::stacked_jagged_2d_to_dense": _traced_padded_by_key,
}


@functools.cache
def _rules() -> dict[str, Rule]:
    """Returns the rules of FBGEMM's operators, which are loaded all at once, by their names."""
    ruled = ((name, _rule_of(name)) for name in operator_names("fbgemm"))
    return {name: rule for name, rule in ruled if rule is not None}


def _rule_of(name: str) -> Rule | None:
    return next((rule for pattern, rule in _RULES.items() if re.fullmatch(f"fbgemm::{pattern}", name)), None)


def _is_lacking(name: str) -> bool:
    """Whether an FBGEMM op runs on CPU and cannot run on fake tensors."""
    return has_kernel(name, "CPU") and not has_kernel(
        name, "Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd"
    )


class _Registration:
    """The kernels, registered from the first block that needs them to the end of the last, of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._kernels: TracingKernels | None = None
        self._names: tuple[str, ...] = ()

    @contextmanager
    def kept(self, *, needed: bool) -> Iterator[tuple[str, ...]]:
        """Keeps the kernels, and registers them if they are needed; yields the names of their operators."""
        with self._lock:
            if needed and self._kernels is None:
                self._kernels, self._names = _register()
            self._depth += 1
        try:
            yield self._names
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._kernels is not None:
                    self._kernels.remove()
                    self._kernels, self._names = None, ()


_REGISTRATION = _Registration()


def _register() -> tuple[TracingKernels, tuple[str, ...]]:
    rules = {name: rule for name, rule in _rules().items() if _is_lacking(name)}
    kernels = TracingKernels("fbgemm")
    for name, rule in rules.items():
        kernels.add_fake(name, rule)
    for name, rule in _TRACED_GRADIENTS.items():
        if name in rules and not has_kernel(name, "Autograd", "AutogradCPU"):
            kernels.add_autograd(name, rule)
    return kernels, tuple(rules)


@contextmanager
def fake_kernels() -> Iterator[tuple[str, ...]]:
    """Gives FBGEMM ops of a TorchRec training step that have no fake kernel one, in the block; yields their names.

    It overrides no kernel. Ops that hide their gradient in their CPU kernel get one that a tracer sees. All are there
    until the outermost block, or another thread's, ends.
    """
    load_fbgemm()
    with _REGISTRATION.kept(needed=True) as names:
        yield names


@contextmanager
def fake_kernels_if_loaded() -> Iterator[None]:
    """Does the same if FBGEMM is imported; else it waits for an inner :func:`fake_kernels`, and keeps its kernels."""
    is_loaded = "fbgemm_gpu" in sys.modules
    if is_loaded:
        load_fbgemm()
    with _REGISTRATION.kept(needed=is_loaded):
        yield
