"""Marks, in a traced step, where FSDP2's groups are about to reduce gradients, or may keep them instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

aten = torch.ops.aten


@dataclass
class Reductions:
    """What a traced step reduces."""

    # By sharded parameter, the local part of its gradient.
    reduced: dict[Tensor, Tensor] = field(default_factory=dict)
    # Where gradients may be kept for a later step's reduction: by sharded parameter its whole gradient on this rank,
    # with its placements if it is a DTensor's, and by index of a group what was reduced over its shards alone, once.
    # Each is a view that only the reduction reads.
    unreduced: dict[Tensor, tuple[Tensor, Any]] = field(default_factory=dict)
    partly_reduced: dict[int, list[Tensor]] = field(default_factory=dict)
    # By group, for which parameters gradients were there each time it might have reduced.
    ready: dict[FSDPParamGroup, list[set[Tensor]]] = field(default_factory=dict)

    @property
    def late(self) -> set[Tensor]:
        """Parameters of groups that may reduce before all gradients are there, and so what has waited by itself."""
        return {
            parameter
            for times in self.ready.values()
            for parameter in set().union(*times)
            if times[0] != set().union(*times)
        }


def post_backward_seen(group: FSDPParamGroup, reductions: Reductions, *unused: Any) -> None:
    """Runs a group's own, and notes which gradients are there."""
    leaves = {p.sharded_param: getattr(p, "_unsharded_param", None) for p in group.fsdp_params}
    ready: set[Tensor] = {
        parameter for parameter, leaf in leaves.items() if getattr(leaf, "grad", None) is not None
    }
    reductions.ready.setdefault(group, []).append(ready)
    type(group).post_backward(group, *unused)


def marked_gradient(parameter: FSDPParam, reductions: Reductions, gradient: Tensor) -> Tensor:
    """Returns what FSDP2 reduces of a gradient; marks it first, unless it is the zeros of an unused parameter."""
    placements = None
    if gradient is parameter._unsharded_param.grad:
        if isinstance(gradient, DTensor):
            placements = gradient.placements
            local = aten.alias.default(gradient._local_tensor)
            gradient = _from_local_no_grad(local, gradient._spec)
        else:
            local = gradient = aten.alias.default(gradient)
        reductions.unreduced[parameter.sharded_param] = local, placements
    return type(parameter)._get_grad_inner_tensor(parameter, gradient)
