"""Gradients that FSDP2's groups keep unreduced, between the microbatches of a step.

``set_requires_gradient_sync(False)`` leaves each parameter's whole gradient on this rank, and
``set_requires_all_reduce(False)`` each group's packed gradients, reduced over its shards and not over its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2 import fsdp_groups, own_reduction, refuse_partial_reduction, replicate_group
from graphpasses._torch.fsdp2_dtypes import KEEPS_GRADIENT_DTYPES
from graphpasses.errors import CaptureError


def pending_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all gradients that wait in a model's groups, reduced by the next backward or not."""
    with reducing(fsdp_groups(model)):
        return Accumulators(model, str, {}).pending()


class Accumulators:
    """What a model's groups keep, and whether they do, by place: a parameter's FQN, or ``"group 0"`` of a group.

    ``canonical`` returns a parameter's first name; ``placements`` are, by place, those of gradients that are
    DTensors.
    """

    def __init__(self, model: nn.Module, canonical: Callable[[str], str], placements: Mapping[str, Any]) -> None:
        self.groups = fsdp_groups(model)
        self._placements = placements
        fqns = {module: fqn for fqn, module in model.named_modules()}
        self.parameters: dict[str, tuple[FSDPParamGroup, FSDPParam]] = {}
        for group in self.groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                fqn = ".".join(filter(None, (fqns[info.module], info.param_name)))
                self.parameters[canonical(fqn)] = group, parameter

    @property
    def kept(self) -> frozenset[str]:
        """The places where the next backward leaves gradients unreduced."""
        parameters = (fqn for fqn, (group, _) in self.parameters.items() if not group.reduce_grads)
        groups = (f"group {index}" for index, group in enumerate(self.groups) if _is_partial(group))
        return frozenset((*parameters, *groups))

    def pending(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that the next backward reduces together with its own."""
        found: dict[str, torch.Tensor] = {}
        for fqn, (group, parameter) in self.parameters.items():
            if group.reduce_grads and (gradient := unreduced_gradient(parameter)) is not None:
                found[fqn] = self._local(fqn, gradient)
        for index, group in enumerate(self.groups):
            if group._partial_reduce_output is not None and group.reduce_grads and not _is_partial(group):
                _refuse_layouts(group)
                found[f"group {index}"] = group._partial_reduce_output.view(1, -1)  # as a graph reduces
        return found

    def clear(self, places: Iterable[str]) -> None:
        """Forgets gradients that were reduced."""
        for place in places:
            if place in self.parameters:
                _clear(self.parameters[place][1])
            else:
                self._group(place)._partial_reduce_output = None

    def keep(
        self,
        place: str,
        gradient: torch.Tensor,
        take: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
    ) -> None:
        """Adds a gradient to what is kept; ``take`` returns it as a parameter's ``.grad``, as autograd makes it.

        Source: ``FSDPParamGroup.post_backward``, ``FSDPParam.accumulate_unsharded_grad_if_needed``, and for a group
        ``foreach_reduce``.
        """
        if place not in self.parameters:
            group = self._group(place)
            if group._partial_reduce_output is None:
                group._partial_reduce_output = gradient.view(-1)
            else:
                group._partial_reduce_output += gradient.view(-1)
            return
        group, parameter = self.parameters[place]
        total = unreduced_gradient(parameter)
        if total is not None:
            self._local(place, total).add_(gradient)
            return
        leaf = _leaf(group, parameter)
        # From 2.15 on a leaf keeps its gradient in the dtype in which it is reduced.
        leaf.grad = take(leaf, gradient.to(leaf.grad_dtype), self._placements.get(place))
        if hasattr(parameter, "to_accumulated_grad_if_needed"):  # up to 2.14
            parameter.to_accumulated_grad_if_needed()

    def group_of(self, fqn: str) -> str:
        """Returns the place of a parameter's group; its FQN, if it is in none."""
        if fqn not in self.parameters:
            return fqn
        return f"group {self.groups.index(self.parameters[fqn][0])}"

    def dtype_of_first(self, fqn: str) -> torch.dtype | None:
        """Returns in what FSDP2 adds the first gradients that wait; None for that of compute, as up to 2.14."""
        if fqn not in self.parameters or not KEEPS_GRADIENT_DTYPES:
            return None
        dtype: torch.dtype | None = cast(Any, self.parameters[fqn][1]).unsharded_grad_dtype
        return dtype

    def _local(self, place: str, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        if tuple(gradient.placements) != tuple(self._placements.get(place, gradient.placements)):
            raise CaptureError(
                f"the gradient of {place!r} that waits to be reduced has placements {gradient.placements}, and that "
                f"of the captured step {self._placements[place]}: they are not added as they are. Run the "
                "microbatches eagerly"
            )
        return local_part(gradient)

    def _group(self, place: str) -> FSDPParamGroup:
        return self.groups[int(place.removeprefix("group "))]


def _is_partial(group: FSDPParamGroup) -> bool:
    if own_reduction(group) is not None:
        refuse_partial_reduction(group)
    is_partial = group.reduce_grads and not group.all_reduce_grads and replicate_group(group) is not None
    if is_partial:
        _refuse_layouts(group)
    return is_partial


def _refuse_layouts(group: FSDPParamGroup) -> None:
    """Raises where FSDP2 notes of what parameters a packed gradient is, as from torch 2.15 on."""
    if hasattr(group, "_partial_reduce_output_layout"):
        raise CaptureError(
            "gradients wait in FSDP2 reduced over shards and not over replicas (set_requires_all_reduce(False)), or "
            "are to wait so, which a captured step does not follow with torch 2.15. Run all microbatches of the step "
            "eagerly, or let them wait unreduced (set_requires_gradient_sync(False))"
        )


def unreduced_gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """Returns a parameter's whole gradient on this rank, which waits to be reduced."""
    found = (getattr(owner, name) for owner, name in _places(parameter))
    return next((each for each in found if each is not None), None)


def _clear(parameter: FSDPParam) -> None:
    for owner, name in _places(parameter):
        setattr(owner, name, None)


def _places(parameter: FSDPParam) -> list[tuple[Any, str]]:
    """Returns owners and names of the attributes in which a parameter keeps gradients."""
    places: list[tuple[Any, str]] = []
    if "unsharded_accumulated_grad" in vars(parameter):  # up to 2.14; then a property, which reads the leaf's
        places.append((parameter, "unsharded_accumulated_grad"))
    if hasattr(parameter, "_unsharded_param"):
        places.append((parameter._unsharded_param, "grad"))
    return places


def _leaf(group: FSDPParamGroup, parameter: FSDPParam) -> nn.Parameter:
    """Returns the unsharded parameter, whose memory is free; FSDP2 makes it when it first gathers."""
    if not hasattr(parameter, "_unsharded_param"):
        numel = parameter.padded_sharded_param_size.numel()
        dtype = parameter.param_dtype or parameter.orig_dtype
        size = group._all_gather_process_group.size()
        parameter.init_all_gather_outputs([numel], [dtype], size, group.device)
        parameter.init_unsharded_param()  # type: ignore[no-untyped-call]
        parameter.free_unsharded_param()
    leaf: nn.Parameter = parameter._unsharded_param
    return leaf


@contextmanager
def reducing(groups: Iterable[FSDPParamGroup], *, reduces: bool = True) -> Iterator[None]:
    """Lets groups reduce all gradients in the block, or keep them, as ``set_requires_gradient_sync`` does."""
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group, *_ in before:
        group.reduce_grads = group.all_reduce_grads = reduces
    try:
        yield
    finally:
        for group, *settings in before:
            group.reduce_grads, group.all_reduce_grads = settings


@contextmanager
def accumulation_set_aside(model: nn.Module) -> Iterator[None]:
    """Lets groups reduce all gradients in the block, and hold none of earlier backwards."""
    groups = fsdp_groups(model)
    with accumulators_restored(model, copied=False), reducing(groups):
        for group in groups:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                _clear(parameter)
        yield


@contextmanager
def accumulators_restored(model: nn.Module, *, copied: bool) -> Iterator[None]:
    """Puts back, after the block, what groups keep; with its values, if they are copied."""
    groups = fsdp_groups(model)
    places = [place for group in groups for parameter in group.fsdp_params for place in _places(parameter)]
    places += [(group, "_partial_reduce_output") for group in groups]
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    copies = [local_part(value).clone() if copied and value is not None else None for _, _, value in before]
    try:
        yield
    finally:
        with torch.no_grad():
            for (owner, name, value), copy in zip(before, copies, strict=True):
                if copy is not None:
                    local_part(value).copy_(copy)
                setattr(owner, name, value)
