"""Runs FSDP2's own hooks while a step is traced, with functional collectives in the place of its communication.

FSDP2 casts what goes into a module and comes out of it, groups the gradients of what several modules read, and knows
when a group's gradients are complete. All this is Python of its hooks, and can be traced as it is. What cannot, since
it writes into buffers that it frees and fills again, is replaced: how a group is gathered, and how it is reduced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from graphpasses._torch import fsdp2, fsdp2_dtypes
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.fsdp2 import fsdp_groups, fsdp_states
from graphpasses._torch.fsdp2_accumulation import unsharded_leaf
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.storage import memories
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.identity import attributes_restored

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

_post_backward = inspect.unwrap(FSDPParamGroup.post_backward)
_RETURNS_STREAM = "post_reduce_stream" in _post_backward.__code__.co_varnames


def prepare_for_tracing(model: nn.Module) -> None:
    """Lets FSDP2 settle what it settles at the first forward, and shards every parameter.

    Raises where `read_groups` does, and where a group communicates in a way that a graph cannot, gathers
    its parameters otherwise than by copying them, or keeps them on the CPU.
    """
    fsdp2.read_groups(model)
    fsdp2.refuse_custom_communication(fsdp_groups(model))
    for _, state in fsdp_states(model):
        try:
            state._lazy_init()  # which makes a root of one that is no part of an earlier one
        except (RuntimeError, AssertionError) as error:  # a group of modules without a module around them, say
            state._is_root = None  # it is not initialized, and would be taken for that the next time
            raise CaptureError(f"FSDP2 refuses the model: {error}") from error
        if getattr(state._state_ctx, "manual_backward_finalization", False):  # 2.15 has it
            raise UnsupportedError(
                "FSDP2's root module is to be finalized by hand (set_manual_backward_finalization), and a "
                "captured step reduces all gradients before it ends. Turn it off"
            )
    groups = fsdp_groups(model)
    fsdp2.reshard(groups)
    for owner, parameter in ((group, p) for group in groups for p in group.fsdp_params):
        fqn = parameter._param_fqn or parameter._module_info.param_name
        if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise UnsupportedError(
                f"parameter {fqn!r} is a {type(parameter._sharded_local_tensor).__name__}, which FSDP2 gathers "
                "through fsdp_pre_all_gather; a captured step gathers plain tensors only. Train it eagerly"
            )
        if parameter.offload_to_cpu:
            raise UnsupportedError(
                f"parameter {fqn!r} is offloaded to the CPU (CPUOffloadPolicy), which a captured step does not "
                "follow. Call fully_shard without offload_policy"
            )
        if not is_fake(parameter._sharded_local_tensor):
            # Made by a later evaluation under inference_mode, no training could gather into it.
            unsharded_leaf(owner, parameter)


@contextmanager
def communication_traced(model: nn.Module, *, copies: bool = False) -> Iterator[Reductions]:
    """Replaces a prepared model's gathers and reductions by functional collectives, which a tracer can record.

    Inside, each parameter that FSDP2 manages is gathered once, when its group first runs forward, and becomes one
    autograd leaf; ``loss.backward()`` reduces the gradients of each group, packed, when FSDP2 would, and fills what
    is yielded. Raises after the block if a gradient is left that eager FSDP2 would not reduce either. If it
    ``copies``, what the one shard of a parameter is gathered into is other memory, as in eager.
    """
    groups = fsdp_groups(model)
    reductions = Reductions()
    if not groups:
        yield reductions
        return
    owner = {parameter: group for group in groups for parameter in group.fsdp_params}
    original = vars(_fsdp_param_group)["foreach_reduce"]

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs).arguments
        group = owner.get(call["fsdp_params"][0])
        if group is None:
            return original(*args, **kwargs)
        return _reduce(group, groups.index(group), call, reductions)

    with ExitStack() as stack:
        stack.enter_context(fsdp2_state_restored(model))
        for group in groups:
            vars(group).update(
                unshard=lambda async_op=False: None,
                wait_for_unshard=partial(_unshard, group, copies),
                reshard=partial(_reshard, group),
                post_backward=partial(post_backward_seen, group, reductions),
            )
            for parameter in group.fsdp_params:
                vars(parameter)["_get_grad_inner_tensor"] = partial(marked_gradient, parameter, reductions)
                vars(parameter)["reset_sharded_param"] = partial(_reset_sharded, parameter)
                info = parameter._module_info
                parameter.sharded_param = cast(nn.Parameter, info.module._parameters[info.param_name])
                parameter.all_gather_outputs = []
                if "unsharded_accumulated_grad" in vars(parameter):  # up to 2.14
                    parameter.unsharded_accumulated_grad = None
                vars(parameter).pop("_unsharded_param", None)
        # record_function makes operators that a graph has no use for.
        stack.enter_context(mock.patch.object(torch.profiler, "record_function", _nothing_recorded))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "record_function", _nothing_recorded))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce))
        yield reductions
        names = {id(shown): fqn for fqn, shown in model.named_parameters()}
        for index, group in enumerate(groups):
            if group.is_unsharded and group not in reductions.ready:
                reductions.unsharded.add(index)
            for each in group.fsdp_params:
                shown = [each.sharded_param, *([each._unsharded_param] if hasattr(each, "_unsharded_param") else ())]
                fqn = next((names[id(one)] for one in shown if id(one) in names), each._module_info.param_name)
                # Not by `to_local()`, which would be traced.
                reductions.memory[fqn] = index, memories([inner for one in shown for inner in read_tensors(one)])
        for parameter in owner:
            if getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None:
                raise CaptureError(
                    f"eager FSDP2 would not reduce the gradient of {parameter._param_fqn!r}: it is complete only "
                    "after its group has reduced. Use the parameter inside its own fully_sharded module only"
                )


@contextmanager
def other_models_refused(model: nn.Module) -> Iterator[None]:
    """Raises if the block runs another model that ``fully_shard`` sharded: FSDP2 would gather and keep it, traced."""
    own = {state for _, state in fsdp_states(model)}
    original = FSDPState._root_pre_forward

    def root_pre_forward(state: FSDPState, module: nn.Module, *args: Any) -> Any:
        if state in own:
            return original(state, module, *args)
        state._training_state = TrainingState.IDLE  # as it was before the call
        raise CaptureError(
            f"loss_fn runs a {type(module).__name__} that fully_shard sharded and that is no part of the model. Name "
            "it: capture_train_step(..., others=(teacher,)), or compute its outputs before the step and give them in "
            "the batch"
        )

    with mock.patch.object(FSDPState, "_root_pre_forward", root_pre_forward):
        yield


@contextmanager
def _nothing_recorded(*_: Any, **__: Any) -> Iterator[None]:
    yield


def fsdp2_state_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Puts back what FSDP2 keeps of a step in its states, groups and parameters; none is there without FSDP2."""
    groups = fsdp_groups(model)
    states = [state for _, state in fsdp_states(model)]
    contexts = (getattr(state, name) for state in states for name in ("_state_ctx", "_comm_ctx"))
    parameters = (parameter for group in groups for parameter in group.fsdp_params)
    return attributes_restored([*states, *contexts, *groups, *parameters])


def _unshard(group: FSDPParamGroup, copies: bool) -> None:
    if not hasattr(group.fsdp_params[0], "_unsharded_param"):
        _gather(group, copies)
    group._to_unsharded()  # type: ignore[no-untyped-call]


def _reshard(group: FSDPParamGroup) -> None:
    # What an int shards otherwise after forward is as well kept: backward frees it.
    is_kept = group._use_post_forward_mesh or not group._reshard_after_forward
    if group._training_state != TrainingState.FORWARD or not is_kept:
        group._to_sharded()  # type: ignore[no-untyped-call]


def _reset_sharded(parameter: FSDPParam) -> None:
    """Asks whether a parameter was replaced by what it is, not by its memory: fake tensors have no address."""
    info = parameter._module_info
    if getattr(info.module, info.param_name) is not parameter.sharded_param:
        type(parameter).reset_sharded_param(parameter)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _gather(group: FSDPParamGroup, copies: bool) -> None:
    """Makes each parameter's unsharded leaf. Source: ``foreach_all_gather`` of FSDP2's ``_fsdp_collectives.py``."""
    num_shards = fsdp2.num_shards(group)
    shards = [_padded_shard(parameter, num_shards) for parameter in group.fsdp_params]
    process_group = group._all_gather_process_group if num_shards > 1 else None
    if process_group is None:
        wholes = [shard.clone() for shard in shards] if copies else shards
    elif len(shards) == 1:
        wholes = [_all_gather(shards[0], process_group)]
    else:
        flat = [shard.reshape(-1) for shard in shards]
        is_mixed = len({shard.dtype for shard in shards}) > 1
        if is_mixed:  # travel as bytes
            flat = [shard.view(torch.uint8) for shard in flat]
        rows = _all_gather(torch.cat(flat), process_group).view(num_shards, -1)
        parts = aten.split_with_sizes_copy.default(rows, [shard.numel() for shard in flat], 1)
        if is_mixed:
            parts = [part.view(shard.dtype) for part, shard in zip(parts, shards, strict=True)]
        wholes = [
            part.view([num_shards * shard.shape[0], *shard.shape[1:]])
            for part, shard in zip(parts, shards, strict=True)
        ]
    for parameter, shard, whole in zip(group.fsdp_params, shards, wholes, strict=True):
        size, dim = parameter._orig_size, parameter.fsdp_placement.dim
        if dim != 0 and num_shards > 1:
            whole = torch.cat(torch.split(whole, shard.shape[0]), dim)
        elif whole.shape != size:
            whole = whole[: size[0]]
        if (spec := fsdp2_dtypes.unsharded_spec(parameter, whole)) is not None:
            whole = _from_local_no_grad(whole, spec)
        parameter._unsharded_param = fsdp2_dtypes.make_leaf(parameter, whole)


def _padded_shard(parameter: FSDPParam, num_shards: int) -> Tensor:
    shard: Tensor = parameter._sharded_local_tensor
    if parameter.param_dtype is not None:
        shard = shard.to(parameter.param_dtype)
    padded = parameter.padded_sharded_param_size
    if _is_uneven(parameter, num_shards):  # on every rank alike
        padding = [0] * (2 * shard.dim() - 1) + [padded[0] - shard.shape[0]]
        shard = aten.constant_pad_nd.default(shard, padding)
    return shard


def _is_uneven(parameter: FSDPParam, num_shards: int) -> bool:
    return parameter._orig_size[parameter.fsdp_placement.dim] % num_shards != 0


def _all_gather(shard: Tensor, process_group: Any) -> Tensor:
    gathered = collectives.all_gather_into_tensor.default(shard, process_group.size(), process_group.group_name)
    waited: Tensor = collectives.wait_tensor.default(gathered)
    return waited


@torch.no_grad()
def _reduce(group: FSDPParamGroup, index: int, call: dict[str, Any], reductions: Reductions) -> tuple[Any, ...]:
    """Reduces what a group has of gradients, as ``foreach_reduce`` of FSDP2's ``_fsdp_collectives.py``."""
    parameters: list[FSDPParam] = call["fsdp_params"]
    gradients: list[Tensor] = call["unsharded_grads"]
    if fsdp2_dtypes.KEEPS_GRADIENT_DTYPES:
        kept: torch.dtype | None = fsdp2_dtypes.check_kept_dtypes(fsdp2.group_name(group), parameters)
    else:
        kept = call["orig_dtype"]
        _check_dtypes(group, parameters, gradients, kept)
    process_group, all_reduce_group = call["reduce_scatter_group"], call["all_reduce_group"]
    num_shards = fsdp2.num_shards(group)
    dtype = call["reduce_dtype"] or gradients[0].dtype
    predivide, postdivide, *ops = fsdp2.divide_factors(group, process_group, all_reduce_group, dtype)
    # PREMUL_SUM by one is a sum; others are refused before the trace, see `read_groups`.
    reduce_scatter_op, all_reduce_op = (fsdp2.op_name(op) or "sum" for op in ops)
    rows = [
        torch.cat(gradient.chunk(num_shards, p.fsdp_placement.dim))
        if p.fsdp_placement.dim != 0 and num_shards > 1
        else gradient
        for p, gradient in zip(parameters, gradients, strict=True)
    ]
    if len({row.dtype for row in rows}) > 1:  # what the copy casts is what is cast before it
        rows = [row.to(dtype) for row in rows]
    packed = _divided(aten._chunk_cat.default(rows, 0, num_shards).to(dtype), predivide)
    own = fsdp2.own_reduction(group)
    if num_shards > 1 and own is not None:
        value = collectives.wait_tensor.default(own.reduce_scatter(packed, process_group))
    elif num_shards > 1:
        value = collectives.reduce_scatter_tensor.default(
            packed, reduce_scatter_op, num_shards, process_group.group_name
        )
        value = collectives.wait_tensor.default(value)
    else:
        value = _divided(packed, group.gradient_divide_factor)
    if all_reduce_group is not None and own is not None:
        value = collectives.wait_tensor.default(own.all_reduce(value, all_reduce_group))
    elif all_reduce_group is not None:
        value = aten.alias.default(value)
        reductions.partly_reduced.setdefault(index, []).append(value)
        value = collectives.all_reduce.default(value, all_reduce_op, all_reduce_group.group_name)
        value = collectives.wait_tensor.default(value)
    value = _divided(value, postdivide)
    if kept is not None:
        value = value.to(kept)
    shapes = [[-(-row.shape[0] // num_shards), *row.shape[1:]] for row in rows]
    parts = value.view(-1).split_with_sizes([torch.Size(shape).numel() for shape in shapes])
    for parameter, part, shape in zip(parameters, parts, shapes, strict=True):
        gradient = part.view(shape)
        if _is_uneven(parameter, num_shards):
            gradient = gradient[: parameter.sharded_size[0]]
        if parameter.sharded_param in reductions.reduced:
            raise CaptureError(
                f"backward reaches {parameter._param_fqn!r} several times, as reentrant checkpointing does; eager "
                "FSDP2 then reduces it several times. Use checkpoint(..., use_reentrant=False)"
            )
        reductions.reduced[parameter.sharded_param] = gradient
        reductions.filled.append(id(parameter.sharded_param))
    gradients.clear()
    stream, event = call["reduce_scatter_stream"], group.device_handle.Event()
    # torch before 2.13 returns no stream.
    return (packed, event, *((stream,) if _RETURNS_STREAM else ()), event, None, None, None)


def _check_dtypes(group: FSDPParamGroup, parameters: list[FSDPParam], gradients: list[Tensor], kept: Any) -> None:
    """Raises where ``foreach_reduce`` does: autograd may leave a gradient of another dtype than its parameter's, and
    FSDP2 did not know, before 2.14, in which the gradients of a group are ``kept`` that first trained nothing.
    """
    if RELEASE < (2, 14) and kept is None and any(each.param_dtype or each.reduce_dtype for each in parameters):
        raise CaptureError(
            f"FSDP2 group {fsdp2.group_name(group)!r} trains parameters, and trained none in the model's first "
            "forward, where FSDP2 reads in which dtypes it reduces: eager FSDP2 cannot reduce their gradients, or "
            "does not as its MixedPrecisionPolicy says. Let them require gradients in the first forward, and freeze "
            "them then"
        )
    fqns: dict[torch.dtype, list[str]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        fqns.setdefault(gradient.dtype, []).append(str(parameter._param_fqn))
    if len(fqns) > 1:
        found = "; ".join(f"{dtype} of {', '.join(map(repr, names))}" for dtype, names in fqns.items())
        raise CaptureError(
            f"FSDP2 group {fsdp2.group_name(group)!r} has gradients of several dtypes, which eager FSDP2 refuses to "
            f"reduce: {found}. Give all gradients of the group one dtype, or shard the module of the others by itself"
        )


def _divided(value: Tensor, divisor: float | None) -> Tensor:
    return value if divisor is None or divisor == 1 else aten.div.Scalar(value, divisor)


@dataclass
class Reductions:
    """What a traced step reduces."""

    # By sharded parameter, the local part of its gradient.
    reduced: dict[Tensor, Tensor] = field(default_factory=dict)
    # The ids of these, and of other parameters of which the gradients' order counts, in that order.
    filled: list[int] = field(default_factory=list)
    # Where gradients may be kept for a later step's reduction: by sharded parameter its whole gradient on this rank,
    # with its placements if it is a DTensor's, and by index of a group what was reduced over its shards alone, once.
    # Each is a view that only the reduction reads.
    unreduced: dict[Tensor, tuple[Tensor, Any]] = field(default_factory=dict)
    partly_reduced: dict[int, list[Tensor]] = field(default_factory=dict)
    # By group, for which parameters gradients were there each time it might have reduced.
    ready: dict[FSDPParamGroup, list[set[Tensor]]] = field(default_factory=dict)
    # Indexes of groups that forward leaves unsharded, and no backward frees: a teacher's root.
    unsharded: set[int] = field(default_factory=set)
    # By FQN of a parameter the index of its group, and its memory, sharded and not.
    memory: dict[str, tuple[int, set[Any]]] = field(default_factory=dict)

    @property
    def late(self) -> set[Tensor]:
        """Parameters of groups that may reduce before all gradients are there, and so what has waited by itself."""
        ready = ((times[0], set().union(*times)) for times in self.ready.values())
        return set().union(*(parameters for first, parameters in ready if first != parameters))


def post_backward_seen(group: FSDPParamGroup, reductions: Reductions, *unused: Any) -> None:
    """Runs a group's own, and notes which gradients are there."""
    leaves = {p.sharded_param: getattr(p, "_unsharded_param", None) for p in group.fsdp_params}
    ready: set[Tensor] = {p for p, leaf in leaves.items() if getattr(leaf, "grad", None) is not None}
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
