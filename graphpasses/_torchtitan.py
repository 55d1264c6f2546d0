"""The only place that touches private names of torchtitan, each with the reason. Tested: torchtitan 0.3.0."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def forget_wrapper_classes() -> None:
    """Makes SimpleFSDP's ``data_parallel`` make new wrapper classes, with this model's mesh and mixed precision: the
    keys of ``simple_fsdp._wrap_class_cache`` are a module's class and the names of its parameters only.
    """
    from torchtitan.experiments.graph_trainer import simple_fsdp

    simple_fsdp._wrap_class_cache.clear()


def wrapped_class(kind: type) -> tuple[Hashable, ...]:
    """Returns the class that SimpleFSDP wrapped, and each parameter's name, mode and dtypes; empty for others."""
    if not _is_wrapper(kind):
        return ()
    computed = _computed(kind)
    base = kind.__bases__[0]
    return base, *((name, each.mode, each.param_dtype, each.reduce_dtype) for name, each in computed)


def wrapper_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None, torch.dtype | None]]:
    """Yields the FQN of each parameter that SimpleFSDP gathers, its dtype then, and its gradient's dtype."""
    for path, module in model.named_modules():
        for name, each in _computed(type(module)) if _is_wrapper(type(module)) else ():
            yield f"{path}.{name}".lstrip("."), each.param_dtype, each.reduce_dtype


def _is_wrapper(kind: type) -> bool:
    return kind.__name__ == f"SimpleFSDP{kind.__bases__[0].__name__}"


def _computed(kind: type) -> list[tuple[str, Any]]:
    """Returns the modules that the getters of ``simple_fsdp._register_parametrization`` call, by parameter."""
    getters = [(name, value.fget) for name, value in vars(kind).items() if isinstance(value, property) and value.fget]
    return [(name, inspect.getclosurevars(getter).nonlocals["parametrization"]) for name, getter in getters]


def save_cpu_attention() -> None:
    """Makes memory policies save what attention computes on a CPU, too, before graph_trainer is imported; for good,
    since ``activation_checkpoint._get_default_save_ops`` names attention's operators on GPUs only, and none can be
    added.
    """
    from torchtitan.distributed import activation_checkpoint

    default_save_ops = activation_checkpoint._get_default_save_ops
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    activation_checkpoint._get_default_save_ops = lambda: {*default_save_ops(), attention}


@contextmanager
def stage_builders(**others: Any) -> Iterator[None]:
    """Lets graph_trainer build a pipeline's stages with other functions, and puts its own back.

    Its provider of stages calls them by their names in ``graph_pp.graph_builder``, and takes none.
    """
    from torchtitan.experiments.graph_trainer.graph_pp import graph_builder

    with mock.patch.multiple(graph_builder, **others):
        yield


def stage_graphs_with_hooks() -> Any:
    """Returns graph_trainer's class of a stage's graphs, which tells subclasses of each forward and full backward.

    The two methods are those that a forward and a backward that run as one graph call, too.
    """
    from torchtitan.experiments.graph_trainer.graph_pp.graph_builder import GraphTrainerStageGraphs

    class StageGraphsWithHooks(GraphTrainerStageGraphs):  # type: ignore[misc]
        """Calls ``before_forward`` with the flat inputs, and ``after_backward`` for what it makes of gradients."""

        def _flat_user_forward_inputs(self, *arguments: Any) -> list[Any]:
            flat: list[Any] = super()._flat_user_forward_inputs(*arguments)
            self.before_forward(flat)
            return flat

        def _split_full_backward_outputs(self, outputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
            of_inputs, gradients = super()._split_full_backward_outputs(outputs)
            return of_inputs, self.after_backward(gradients)

    return StageGraphsWithHooks


def has_torchtitans_products(experts: Any) -> bool:
    """Whether experts compute by ``GroupedExperts._grouped_mm``, and not in a way of their own."""
    from torchtitan.models.common.moe import GroupedExperts

    return isinstance(experts, GroupedExperts) and type(experts)._grouped_mm is GroupedExperts._grouped_mm


class ProductsByRank:
    """Replaces what a dispatcher and its experts call, since torchtitan has no hooks there.

    Tokens stay in the order of the ranks that sent them, and those of each rank are multiplied by themselves.
    """

    def __init__(self, routed: Any) -> None:
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
