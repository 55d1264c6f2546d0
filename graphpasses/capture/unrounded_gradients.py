"""Gradients that FSDP2 reduces unrounded from torch 2.15 on, and SimpleFSDP rounds to the dtype of compute before.

An operator that promotes, as ``float32 * bfloat16`` does, gives its bfloat16 operand a float32 gradient. Autograd
casts it to what the operand is, unless that is a leaf without a ``grad_dtype``: so FSDP2's unsharded parameters are
while backward runs, if gradients are reduced in a wider dtype (``FSDPParamGroup._set_unsharded_grad_dtypes``).
SimpleFSDP's are no leaves.

What tensor parallelism replicates is a leaf whose ``grad_dtype`` is that of FSDP2's reduction: its gradient is cast
before tensor parallelism adds it (``FSDPParam.may_reduce_grad_outside_dp``). SimpleFSDP casts it afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2_dtypes import KEEPS_GRADIENT_DTYPES
from graphpasses._torchtitan import wrapped_class
from graphpasses.analysis import parameter_collectives
from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.parameter_collectives import ALL_REDUCE, CAST, GradReduction, added_uses
from graphpasses.errors import UnsupportedError
from graphpasses.graph import WAIT, TrainGraph, argument, get_state

aten = torch.ops.aten


def keep_unrounded(graph: TrainGraph, model: nn.Module) -> None:
    """Lets gradients of a SimpleFSDP model reach their reduction as those of FSDP2 do; others are left alone.

    ``graph`` is a captured step or a joint graph, before any pass.
    """
    if not KEEPS_GRADIENT_DTYPES or not any(wrapped_class(type(module)) for module in model.modules()):
        return
    found = graph.graph.find_nodes(op="call_function", target=CAST)
    casts = {node.meta.get("seq_nr") for node in found if not is_backward(node)}
    unrounded, wide = [], []
    for fqn, reductions in parameter_collectives.find_grad_reductions(graph).items():
        casts_of = [reduction for reduction in reductions if reduction.entry.target == CAST]
        if not any(_width(each.entry) > _width(each.gradient) for each in casts_of):
            continue
        is_replicated = _is_replicated(get_state(model, fqn), reductions[0])
        launches = [_reduction_before(reduction) if is_replicated else None for reduction in reductions]
        # That autograd computed on this rank.
        gradients = [argument(each) if each else _of_whole(of) for each, of in zip(launches, reductions, strict=True)]
        uses = [use for gradient in gradients for use in added_uses(gradient)]
        rounded = [use for use in uses if _is_rounding(use, casts)]
        if is_replicated and len(uses) > 1:
            raise UnsupportedError(
                f"parameter {fqn!r}, which tensor parallelism replicates, has {len(uses)} uses, whose gradients "
                "FSDP2 of this torch adds in the dtype in which it reduces; SimpleFSDP adds them in that of compute. "
                "Capture the model that fully_shard sharded, or reduce in the dtype of compute"
            )
        if rounded and (len(rounded) < len(uses) or len(uses) > len(reductions)):
            raise UnsupportedError(
                f"{len(rounded)} of {len(uses)} uses of parameter {fqn!r} give it a gradient that is wider than it, "
                "which FSDP2 of this torch adds to the others unrounded; SimpleFSDP rounds it first. Capture the "
                "model that fully_shard sharded"
            )
        for use in rounded:
            _skip_rounding(graph, use)
        if rounded:
            unrounded.append(fqn)
        if launch := launches[0]:
            _widen(graph, launch, reductions[0])
            wide.append(fqn)
    if unrounded:
        graph.note(
            "gradients are not rounded to the dtype of compute before they are reduced, as in FSDP2 of this torch; "
            f"SimpleFSDP alone rounds them: {', '.join(unrounded)}"
        )
    if wide:
        graph.note(
            "tensor parallelism adds gradients in the dtype in which FSDP reduces them, as in FSDP2 of this torch; "
            f"with SimpleFSDP alone it adds them in the dtype of compute: {', '.join(wide)}"
        )


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _is_replicated(parameter: torch.Tensor, reduction: GradReduction) -> bool:
    """Whether an axis of the mesh that is not FSDP's, as those of tensor parallelism behind them, has copies."""
    if not isinstance(parameter, DTensor):
        return False
    both = (each for each in (reduction.reduce_scatter, reduction.all_reduce) if each is not None)
    num_ranks = math.prod(len(parameter_collectives.collective_ranks(each)) for each in both)
    others = [*zip(parameter.device_mesh.shape, parameter.placements, strict=True)]
    while num_ranks > 1 and others:
        num_ranks //= others.pop(0)[0]
    return any(size > 1 and placement.is_replicate() for size, placement in others)


def _of_whole(reduction: GradReduction) -> fx.Node:
    """Returns the gradient of what SimpleFSDP gives to the model, which is a view of what it gathered."""
    gradient = reduction.gradient
    return argument(gradient) if gradient.target == aten.view.default else gradient


def _reduction_before(reduction: GradReduction) -> fx.Node | None:
    """Returns the all-reduce of a whole gradient, if there is one."""
    whole = _of_whole(reduction)
    is_reduced = whole.target == WAIT and argument(whole).target == ALL_REDUCE
    return argument(whole) if is_reduced else None


def _widen(graph: TrainGraph, launch: fx.Node, reduction: GradReduction) -> None:
    """Lets tensor parallelism add in the dtype that FSDP casts to afterwards."""
    gradient = argument(launch)
    dtype = reduction.entry.meta["val"].dtype
    if gradient.meta["val"].dtype != dtype:
        with graph.graph.inserting_before(launch):
            cast = graph.graph.call_function(CAST, (gradient,), {"dtype": dtype})
        cast.meta = gradient.meta | {"val": gradient.meta["val"].to(dtype)}
        launch.replace_input_with(gradient, cast)
    for node in {launch, _of_whole(reduction), reduction.gradient}:
        node.meta["val"] = node.meta["val"].to(dtype)


def _is_rounding(use: fx.Node, casts: set[Any]) -> bool:
    """Whether the engine casts a gradient to a narrower dtype; a cast of the model has its forward's number."""
    is_engines = use.target == CAST and is_backward(use) and use.meta.get("seq_nr") not in casts
    return is_engines and _width(argument(use)) > _width(use)


def _skip_rounding(graph: TrainGraph, rounding: fx.Node) -> None:
    """Lets readers of the rounded value read the unrounded one; a view of it has its dtype."""
    wide = argument(rounding)
    for view in [user for user in rounding.users if user.target == aten.view.default]:
        view.meta["val"] = view.meta["val"].to(wide.meta["val"].dtype)
    rounding.replace_all_uses_with(wide)
    graph.graph.erase_node(rounding)
