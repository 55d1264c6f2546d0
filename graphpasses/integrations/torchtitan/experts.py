"""torchtitan's experts with the same bits at any expert-parallel degree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from graphpasses._torchtitan import ProductsByRank, has_torchtitans_products
from graphpasses.errors import UnsupportedError

_ELSE = "train with one expert-parallel degree, without any_expert_degree"


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
    :func:`~graphpasses.canonical_reductions`, in the dtype of the weights.

    Args:
        model: of torchtitan, whose experts are parallelized, and pass :func:`check_experts`.
        training: torchtitan's configuration, which has the dtypes.
        accumulate: dtype in which ranks' contributions are added; None: that in which they travel.

    Raises:
        UnsupportedError: contributions are added in another dtype than that of the weights, or experts compute in a
            way of their own.
    """
    compute, reduce = (TORCH_DTYPE_MAP[getattr(training, f"mixed_precision_{name}")] for name in ("param", "reduce"))
    added = accumulate or reduce
    if not compute == added == torch.bfloat16:
        raise UnsupportedError(
            f"experts compute in torch.bfloat16, and ranks' gradients are added in {added} of weights in {compute}: "
            "those of ranks that share experts would be rounded otherwise. Set training.mixed_precision_param and "
            "training.mixed_precision_reduce to 'bfloat16' in the configuration (torchtitan's command line knows "
            f"float32 alone for the latter; --any-expert-degree sets it) and leave out accumulate=, or {_ELSE}"
        )
    for name, each in _routed(model):
        if not has_torchtitans_products(each.inner_experts):
            raise UnsupportedError(
                f"{name!r} has experts of {type(each.inner_experts).__name__}, whose products by rank are not known: "
                + _ELSE
            )
    for _, each in _routed(model):
        if getattr(each.token_dispatcher, "ep_mesh", None) is not None:
            ProductsByRank(each)


def _routed(model: nn.Module) -> list[tuple[str, RoutedExperts]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, RoutedExperts)]
