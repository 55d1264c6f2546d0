"""torchtitan's experts with the same bits at any expert-parallel degree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

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
        experts = each.inner_experts
        products = getattr(type(experts), "_grouped_mm", None)
        if not isinstance(experts, GroupedExperts) or products is not GroupedExperts._grouped_mm:
            raise UnsupportedError(
                f"{name!r} has experts of {type(experts).__name__}, whose products by rank are not known: {_ELSE}"
            )
    for _, each in _routed(model):
        if getattr(each.token_dispatcher, "ep_mesh", None) is not None:
            _ByRank(each)


def _routed(model: nn.Module) -> list[tuple[str, RoutedExperts]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, RoutedExperts)]


class _ByRank:
    """Replaces what a dispatcher and its experts call: tokens stay in the order of the ranks that sent them."""

    def __init__(self, routed: RoutedExperts) -> None:
        self._num_tokens: Sequence[int] = ()  # that each rank sent
        dispatcher, experts = routed.token_dispatcher, routed.inner_experts
        self._synchronize, self._product = dispatcher._sync_token_count_exchange, experts._grouped_mm
        dispatcher._sync_token_count_exchange = self._sync_token_count_exchange
        dispatcher._permute, dispatcher._unpermute = self._permute, self._unpermute
        experts._grouped_mm = self._grouped_mm

    def _sync_token_count_exchange(self, *counts: Any) -> Any:
        result = self._synchronize(*counts)
        self._num_tokens = result[2]
        return result

    def _permute(self, tokens: Tensor, num_tokens: Tensor) -> tuple[torch.Size, Tensor, None, Tensor]:
        return tokens.shape, tokens, None, num_tokens

    def _unpermute(self, tokens: Tensor, *_: Any) -> Tensor:
        return tokens

    def _grouped_mm(self, **factors: Tensor) -> Tensor:
        """``offs`` has the ends of each expert's tokens of the first rank, then of the second."""
        ends = factors["offs"].view(len(self._num_tokens), -1)
        starts = torch.cat([ends.new_zeros(1), ends[:-1, -1]])
        tokens = torch.split(factors["A"], list(self._num_tokens))
        by_rank = list(zip(tokens, ends - starts[:, None], strict=True))
        return torch.cat(self._products(factors["B_t"], by_rank))

    def _products(self, weights: Tensor, by_rank: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Autograd adds the two gradients of each view: a binary tree over ranks."""
        if len(by_rank) == 1:
            ((tokens, ends),) = by_rank
            return [self._product(A=tokens, B_t=weights, offs=ends)]
        weights, half = weights.view_as(weights), len(by_rank) // 2
        return self._products(weights, by_rank[:half]) + self._products(weights, by_rank[half:])
