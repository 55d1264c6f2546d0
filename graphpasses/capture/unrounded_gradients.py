"""Gradients that FSDP2 reduces unrounded from torch 2.15 on, and SimpleFSDP rounds to the dtype of compute before.

An operator that promotes, as ``float32 * bfloat16`` does, gives its bfloat16 operand a float32 gradient. Autograd
casts it to what the operand is, unless that is a leaf without a ``grad_dtype``: so FSDP2's unsharded parameters are
while backward runs, if gradients are reduced in a wider dtype (``FSDPParamGroup._set_unsharded_grad_dtypes``).
SimpleFSDP's are no leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2_dtypes import KEEPS_GRADIENT_DTYPES
from graphpasses._torchtitan import wrapped_class
from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.parameter_collectives import (
    CAST,
    GradReduction,
    added_uses,
    find_grad_reductions,
)
from graphpasses.errors import UnsupportedError
from graphpasses.graph import TrainGraph, argument
from graphpasses.graph.parameters import get_state

__all__ = ["keep_unrounded"]

aten = torch.ops.aten


def keep_unrounded(graph: TrainGraph, model: nn.Module) -> None:
    """Lets gradients of a SimpleFSDP model reach their reduction as those of FSDP2 do; others are left alone.

    Args:
        graph: a captured step or a joint graph, before any pass.
        model: that was traced.

    Raises:
        UnsupportedError: FSDP2 adds a parameter's gradients in a dtype that this graph does not have.
    """
    if not KEEPS_GRADIENT_DTYPES or not any(wrapped_class(type(module)) for module in model.modules()):
        return
    casts = {node.meta.get("seq_nr") for node in _casts(graph) if not is_backward(node)}
    changed = []
    for fqn, reductions in find_grad_reductions(graph).items():
        if not any(map(_is_widened, reductions)):
            continue
        _refuse_tensor_parallelism(fqn, get_state(model, fqn))
        uses = [use for reduction in reductions for use in added_uses(_of_whole(reduction))]
        rounded = [use for use in uses if _is_rounding(use, casts)]
        if not rounded:
            continue
        if len(rounded) < len(uses) or len(uses) > len(reductions):
            raise UnsupportedError(
                f"{len(rounded)} of {len(uses)} uses of parameter {fqn!r} give it a gradient that is wider than it, "
                "which FSDP2 of this torch adds to the others unrounded; SimpleFSDP rounds it first. Capture the "
                "model that fully_shard sharded"
            )
        for reduction in reductions:
            _skip_rounding(graph, reduction)
        changed.append(fqn)
    if changed:
        graph.note(
            "gradients are not rounded to the dtype of compute before they are reduced, as in FSDP2 of this torch; "
            f"SimpleFSDP alone rounds them: {', '.join(changed)}"
        )


def _casts(graph: TrainGraph) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=CAST))


def _is_widened(reduction: GradReduction) -> bool:
    return reduction.entry.target == CAST and _width(reduction.entry) > _width(reduction.gradient)


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _refuse_tensor_parallelism(fqn: str, parameter: torch.Tensor) -> None:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    is_sharded = [not placement.is_replicate() for placement in placements]
    if True in is_sharded and not all(is_sharded[is_sharded.index(True) :]):
        raise UnsupportedError(
            f"tensor parallelism reduces the gradient of parameter {fqn!r}, which FSDP2 of this torch widens before, "
            "and SimpleFSDP afterwards. Capture the model that fully_shard sharded, or reduce in the dtype of compute"
        )


def _of_whole(reduction: GradReduction) -> fx.Node:
    """Returns the gradient of what SimpleFSDP hands to the model, which is a view of what it gathered."""
    gradient = reduction.gradient
    return argument(gradient) if gradient.target == aten.view.default else gradient


def _is_rounding(use: fx.Node, casts: set[Any]) -> bool:
    """Whether the engine casts a gradient to a narrower dtype; a cast of the model has its forward's number."""
    is_engines = use.target == CAST and is_backward(use) and use.meta.get("seq_nr") not in casts
    return is_engines and _width(argument(use)) > _width(use)


def _skip_rounding(graph: TrainGraph, reduction: GradReduction) -> None:
    rounding = _of_whole(reduction)
    wide = argument(rounding)
    if reduction.gradient is not rounding:
        view = reduction.gradient
        view.meta["val"] = view.meta["val"].to(wide.meta["val"].dtype)
    rounding.replace_all_uses_with(wide)
    graph.graph.erase_node(rounding)
