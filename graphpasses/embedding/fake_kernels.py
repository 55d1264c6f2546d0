"""Fake kernels for the FBGEMM ops that have none: how shapes follow from shapes.

FBGEMM's CUDA build brings Meta kernels for its training ops, its CPU build (checked: 1.8.0) does not.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.operators import (
    argument_defaults,
    has_kernel,
    operator_names,
    register_fake_kernel,
)
from graphpasses.embedding._fbgemm import load_fbgemm

__all__ = ["register_fake_kernels"]

# FBGEMM's `SparseType`, by value; its CPU kernels read any other as the dtype of the weights.
_SPARSE_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}

# Dispatch keys whose kernels serve fake tensors.
_FAKE_KEYS = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")

# The registrations live as long as this does.
_LIBRARY = torch.library.Library("fbgemm", "FRAGMENT")  # type: ignore[no-untyped-call]

# A rule reads the arguments of a call by their names in the op's schema.
_Rule = Callable[[SimpleNamespace], Any]


def _empty(like: Tensor, *shape: int | torch.SymInt, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _dynamic_size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


# ---- table-batched embeddings --------------------------------------------------------------------------


def _looked_up(call: SimpleNamespace, *shape: int | torch.SymInt) -> Tensor:
    dtype = _SPARSE_TYPES.get(call.output_dtype, call.host_weights.dtype)
    return _empty(call.host_weights, *shape, dtype=dtype)


def _pooled_lookup(call: SimpleNamespace) -> Tensor:
    num_features = call.D_offsets.numel() - 1
    batch_size = (call.offsets.numel() - 1) // num_features
    return _looked_up(call, batch_size, call.total_D)


def _variable_batch_lookup(call: SimpleNamespace) -> Tensor:
    return _looked_up(call, call.vbe_output_size)


def _sequence_lookup(call: SimpleNamespace) -> Tensor:
    return _looked_up(call, call.indices.numel(), call.D)


def _fused_update(call: SimpleNamespace) -> None:
    """Tables and optimizer states change in place; the CPU kernels return an undefined tensor."""


def _indice_weights_gradient(call: SimpleNamespace) -> Tensor:
    return torch.empty_like(call.indices, dtype=torch.float32)


# ---- jagged and permuted ids ---------------------------------------------------------------------------


def _like_embeddings(call: SimpleNamespace) -> Tensor:
    return torch.empty_like(call.pooled_embs)


def _permuted_sequences(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    lengths = _empty(call.lengths, call.permute.numel(), call.lengths.size(1))
    return lengths, _empty(call.embeddings, _dynamic_size(), *call.embeddings.shape[1:])


# Full op names (without the namespace) to rules.
_RULES: tuple[tuple[str, _Rule], ...] = (
    (r"split_embedding_codegen_forward_(un)?weighted_pt2_wrapper", _pooled_lookup),
    (r"split_embedding_codegen_forward_(un)?weighted_vbe_pt2_wrapper", _variable_batch_lookup),
    (r"split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper", _sequence_lookup),
    (r"split_embedding_(nobag_)?backward_codegen_\w+_(un)?weighted(_vbe)?_pt2_wrapper", _fused_update),
    (r"split_embedding_codegen_grad_indice_weights(_vbe)?_pt2_wrapper", _indice_weights_gradient),
    (r"permute_(duplicate_)?pooled_embs(_auto_grad)?_split", _like_embeddings),
    (r"permute_sequence_embeddings", _permuted_sequences),
)


def _lacking() -> Iterator[str]:
    """Yields the FBGEMM ops that run on CPU and cannot run on fake tensors."""
    for name in operator_names("fbgemm"):
        if has_kernel(name, "CPU") and not any(has_kernel(name, key) for key in _FAKE_KEYS):
            yield name


def _fake_kernel(name: str, rule: _Rule) -> Callable[..., Any]:
    defaults = argument_defaults(getattr(torch.ops.fbgemm, name.removeprefix("fbgemm::")).default)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Trailing arguments that equal their default are not passed.
        return rule(SimpleNamespace(**defaults | dict(zip(defaults, args, strict=False)) | kwargs))

    return kernel


@cache
def register_fake_kernels() -> tuple[str, ...]:
    """Registers fake kernels for the FBGEMM ops of a TorchRec training step that have none.

    It registers them once for the process, overrides none, and leaves ops that it does not know alone.

    Returns:
        Names of the ops it registered, e.g. ``"fbgemm::permute_sequence_embeddings"``.

    Raises:
        CaptureError: FBGEMM is not installed.

    Example:
        >>> register_fake_kernels()  # doctest: +SKIP
        ('fbgemm::permute_pooled_embs_auto_grad_split', ...)
    """
    load_fbgemm()
    rules = {
        name: rule
        for name in _lacking()
        for pattern, rule in _RULES
        if re.fullmatch(pattern, name.removeprefix("fbgemm::"))
    }
    for name, rule in rules.items():
        register_fake_kernel(_LIBRARY, name, _fake_kernel(name, rule))
    return tuple(rules)
