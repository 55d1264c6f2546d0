"""Gradients that FSDP2's groups keep unreduced, between the microbatches of a step.

``set_requires_gradient_sync(False)`` leaves each parameter's whole gradient on this rank, and
``set_requires_all_reduce(False)`` each group's packed gradients, reduced over its shards and not over its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2 import fsdp_groups, num_shards, reduces_partly
from graphpasses._torch.fsdp2_dtypes import KEEPS_GRADIENT_DTYPES
from graphpasses.errors import CaptureError


def pending_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all gradients that wait in a model's groups, reduced by the next backward or not."""
    with reducing(fsdp_groups(model)):
        return Accumulators(model, str, {}, None).pending()


class Accumulators:
    """What a model's groups keep, and whether they do, by place: a parameter's FQN, or ``"group 0"`` of a group.

    ``canonical`` returns a parameter's first name; ``placements`` are, by place, those of gradients that are
    DTensors; ``trained`` are the FQNs of the parameters that a step reduces, or None to look only.
    """

    def __init__(
        self,
        model: nn.Module,
        canonical: Callable[[str], str],
        placements: Mapping[str, Any],
        trained: Collection[str] | None,
    ) -> None:
        self.groups = fsdp_groups(model)
        self._placements, self._trained = placements, trained
        fqns = {module: fqn for fqn, module in model.named_modules()}
        self.parameters: dict[str, tuple[FSDPParamGroup, FSDPParam]] = {}
        for group in self.groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                fqn = ".".join(filter(None, (fqns[info.module], info.param_name)))
                self.parameters[canonical(fqn)] = group, parameter
        self._fqns = {parameter: fqn for fqn, (_, parameter) in self.parameters.items()}

    @property
    def kept(self) -> frozenset[str]:
        """The places where the next backward leaves gradients unreduced."""
        parameters = (fqn for fqn, (group, _) in self.parameters.items() if not group.reduce_grads)
        groups = (f"group {index}" for index, group in enumerate(self.groups) if reduces_partly(group))
        return frozenset((*parameters, *groups))

    def pending(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that the next backward reduces together with its own."""
        found: dict[str, torch.Tensor] = {}
        for fqn, (group, parameter) in self.parameters.items():
            if group.reduce_grads and (gradient := unreduced_gradient(parameter)) is not None:
                found[fqn] = self._local(fqn, gradient)
        for index, group in enumerate(self.groups):
            is_pending = group._partial_reduce_output is not None and group.reduce_grads and not reduces_partly(group)
            if is_pending and (packed := self._packed(group)) is not None:
                found[f"group {index}"] = packed.view(1, -1)  # as a graph reduces
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
            if (packed := self._packed(group)) is None:
                group._partial_reduce_output = gradient.view(-1)
            else:
                packed += gradient.view(-1)
            return
        group, parameter = self.parameters[place]
        total = unreduced_gradient(parameter)
        if total is not None:
            self._local(place, total).add_(gradient)
            return
        leaf = unsharded_leaf(group, parameter)
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
        """Returns in what FSDP2 adds the uses of a first gradient that waits; None up to 2.14, and for others."""
        _, parameter = self.parameters[fqn]
        if not KEEPS_GRADIENT_DTYPES or unreduced_gradient(parameter) is not None:
            return None
        dtype: torch.dtype | None = cast(Any, parameter).unsharded_grad_dtype
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

    def _packed(self, group: FSDPParamGroup) -> torch.Tensor | None:
        """Returns what waits in a group for its replicas, packed as a step packs it: from 2.15 on by parameter."""
        waiting: torch.Tensor | None = group._partial_reduce_output
        if self._trained is None or not KEEPS_GRADIENT_DTYPES:
            return waiting
        by_parameter: Any = group
        order = (group.fsdp_params[index] for index in by_parameter._reduce_scatter_param_indices)
        trained = [parameter for parameter in order if self._fqns[parameter] in self._trained]
        others = by_parameter._partial_reduce_output_layout.keys() - trained
        if waiting is not None and others:
            raise CaptureError(
                f"FSDP2 holds a gradient of {min(self._fqns[each] for each in others)!r} that waits to be reduced "
                "over replicas, and the captured step computes none with which eager would reduce it. Run all "
                "microbatches of the step eagerly"
            )
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in trained]
        dtype = None if waiting is None else waiting.dtype
        packed: torch.Tensor | None = by_parameter._prepare_partial_reduce_output(trained, sizes, dtype)
        return packed

    def _group(self, place: str) -> FSDPParamGroup:
        return self.groups[int(place.removeprefix("group "))]


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


def unsharded_leaf(group: FSDPParamGroup, parameter: FSDPParam) -> nn.Parameter:
    """Returns the unsharded parameter, whose memory is free; FSDP2 makes it when it first gathers."""
    if not hasattr(parameter, "_unsharded_param"):
        numel = parameter.padded_sharded_param_size.numel()
        dtype = parameter.param_dtype or parameter.orig_dtype
        parameter.init_all_gather_outputs([numel], [dtype], num_shards(group), group.device)
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
