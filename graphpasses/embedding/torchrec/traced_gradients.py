"""Gradients that FBGEMM's CPU kernels hide: autograd runs inside the kernel, where a tracer does not look.

Each is made of the same kernels that eager's forward and backward run, so results keep eager's bits.
"""

from collections.abc import Callable, Container
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.schemas import Rule, TracingKernels, below_autograd, has_kernel


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
            weights_gradient = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
                grad,
                # FBGEMM declares that it writes the table, of which it reads only the shape: one number
                # stands in for it, so that functionalization does not copy the table.
                call.dev_weights.new_zeros(()).expand_as(call.dev_weights),
                call.weights_offsets,
                call.D_offsets,
                call.max_D,
                call.hash_size_cumsum,
                call.total_hash_size_bits,
                call.indices,
                call.offsets,
                call.pooling_mode,
                call.indice_weights,
            )
        if ctx.needs_input_grad[1]:
            indice_weights_gradient = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
                grad,
                call.dev_weights,
                call.weights_offsets,
                call.D_offsets,
                call.indices,
                call.offsets,
                call.feature_requires_grad,
            )
        return weights_gradient, indice_weights_gradient, None


def _dense_lookup(call: SimpleNamespace) -> Tensor:
    apply: Callable[..., Tensor] = _DenseLookup.apply
    return apply(call.dev_weights, call.indice_weights, call)


def _padded_by_key(call: SimpleNamespace) -> list[Tensor]:
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


_RULES: dict[str, Rule] = {
    "fbgemm::dense_embedding_codegen_lookup_function": _dense_lookup,
    "fbgemm::index_select_dim0": lambda call: torch.index_select(call.input, 0, call.indices),
    "fbgemm::stacked_jagged_1d_to_dense": _padded_by_key,
    "fbgemm::stacked_jagged_2d_to_dense": _padded_by_key,
}


def add_traced_gradients(kernels: TracingKernels, names: Container[str]) -> None:
    """Gives the ops among ``names`` whose gradient is hidden one that a tracer sees, as long as ``kernels`` last."""
    for name, rule in _RULES.items():
        if name in names and not has_kernel(name, "Autograd", "AutogradCPU"):
            kernels.add_autograd(name, rule)
