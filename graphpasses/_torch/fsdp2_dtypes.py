"""In which dtypes FSDP2's groups compute, keep gradients and reduce them.

torch 2.15 has a policy for each parameter (``param_dtype_override_fn``), and reduces in the dtype in which gradients
are kept where the policy names none; before, a group has one policy, and what that computes in is reduced. Which of
the rules holds is seen by what FSDP2's classes have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from graphpasses.errors import LayoutError, UnsupportedError

KEEPS_GRADIENT_DTYPES = hasattr(FSDPParam, "unsharded_grad_dtype")  # 2.15 has it
"""Whether parameters say in which dtypes gradients are added and kept, and those that are packed may have several."""


def group_policies(group: FSDPParamGroup) -> tuple[MixedPrecisionPolicy, ...]:
    """Returns the mixed-precision policy of each parameter, in the group's order."""
    if hasattr(group, "mp_policy"):  # up to 2.14
        return (group.mp_policy,) * len(group.fsdp_params)
    return tuple(parameter.mp_policy for parameter in group.fsdp_params)


def compute_dtypes(group: FSDPParamGroup) -> frozenset[torch.dtype]:
    """Returns the dtypes in which a group's trained, or all, parameters will be unsharded (``init_dtype_attrs``)."""
    return frozenset(_compute_dtype(parameter, policy) for parameter, policy in _trained(group))


def kept_dtypes(group: FSDPParamGroup) -> frozenset[torch.dtype]:
    """Returns the dtypes in which a group's sharded gradients are kept."""
    trained = (parameter for parameter, _ in _trained(group))
    if not KEEPS_GRADIENT_DTYPES:
        return frozenset(parameter.sharded_param.dtype for parameter in trained)
    return frozenset(_kept_dtype(parameter) or parameter.sharded_param.dtype for parameter in trained)


def _compute_dtype(parameter: FSDPParam, policy: MixedPrecisionPolicy) -> torch.dtype:
    dtype: torch.dtype = parameter.sharded_param.dtype
    return (policy.param_dtype if dtype.is_floating_point else None) or dtype


def _trained(group: FSDPParamGroup) -> list[tuple[FSDPParam, MixedPrecisionPolicy]]:
    both = list(zip(group.fsdp_params, group_policies(group), strict=True))
    return [each for each in both if each[0].sharded_param.requires_grad] or both


def reduce_dtype(group: FSDPParamGroup, name: str) -> torch.dtype:
    """Returns the dtype in which a group's gradients travel; raises where its parameters, or gradients, have several.

    Source: ``FSDPParamGroup._init_mp_dtypes``, and from torch 2.15 on ``FSDPParamGroup._get_reduce_dtype``.
    """
    trained = _trained(group)
    dtypes = {parameter.sharded_param.dtype for parameter, _ in trained}
    if len(dtypes) > 1:
        raise LayoutError(
            f"FSDP2 group {name!r} has trainable parameters of several dtypes, "
            f"{', '.join(sorted(map(str, dtypes)))}, which FSDP2 refuses to run; put them in separate groups"
        )
    first, policy = trained[0]
    if not KEEPS_GRADIENT_DTYPES:
        return policy.reduce_dtype or _compute_dtype(first, policy)
    kept = check_kept_dtypes(name, (parameter for parameter, _ in trained))
    return policy.reduce_dtype or kept


def simple_reduce_dtype(
    model: nn.Module, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns in what SimpleFSDP must reduce a model's gradients, so that their bits are FSDP2's; None: in their own.

    SimpleFSDP adds the gradients of a parameter in the dtype of compute. Up to torch 2.14 so does FSDP2; from 2.15
    on autograd adds them in FSDP2's dtype of reduction, unless that is wider and nothing but FSDP2 reduces them.
    The model is not yet sharded by FSDP. A ``param_dtype`` of None is the parameters' own, a ``reduce_dtype`` of
    None FSDP2's default. Raises where that would differ by parameter, or FSDP2's additions from SimpleFSDP's. Source:
    ``FSDPParamGroup._init_mp_dtypes``, ``FSDPParam.may_reduce_grad_outside_dp``.
    """
    if not KEEPS_GRADIENT_DTYPES:
        return reduce_dtype or param_dtype
    trained = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    dtypes = {p.dtype for p in trained.values()}
    if reduce_dtype is None and param_dtype is not None:
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"the model has trainable parameters of several dtypes, {', '.join(sorted(map(str, dtypes)))}, and "
                "FSDP2 reduces gradients in that of their parameters; say in which with reduce_dtype"
            )
        reduce_dtype = next(iter(dtypes), param_dtype)
    for fqn, parameter in trained.items():
        compute_dtype = param_dtype or parameter.dtype
        if reduce_dtype not in (None, compute_dtype) and reduce_dtype.itemsize <= compute_dtype.itemsize:
            raise UnsupportedError(
                f"the gradients of parameter {fqn!r} are computed in {compute_dtype}, and from torch 2.15 on FSDP2 "
                f"adds those of its uses in reduce_dtype {reduce_dtype} already; SimpleFSDP does not. Capture the "
                f"model that fully_shard sharded, or reduce in {compute_dtype}"
            )
    return reduce_dtype


def check_kept_dtypes(name: str, parameters: Iterable[FSDPParam]) -> torch.dtype:
    """Returns the one dtype of kept gradients. Source: ``FSDPParamGroup._init_reduce_scatter_param_order``."""
    fqns: dict[torch.dtype | None, list[str]] = {}
    for parameter in parameters:
        fqns.setdefault(_kept_dtype(parameter), []).append(parameter._param_fqn or parameter._module_info.param_name)
    (dtype, *others) = fqns
    if dtype is None or others:
        found = "; ".join(f"{each} of {', '.join(map(repr, names))}" for each, names in fqns.items())
        raise UnsupportedError(
            f"FSDP2 group {name!r} keeps gradients in several dtypes, or in any (grad_dtype): {found}. A captured "
            "step packs gradients of one dtype. Give all parameters of the group one grad_dtype, or shard the module "
            "of the others by itself"
        )
    return dtype


def _kept_dtype(parameter: Any) -> torch.dtype | None:
    sharded = parameter.sharded_param
    # Read when it was sharded, and at the first forward.
    is_known = parameter._has_sharded_grad_dtype_override
    kept: torch.dtype | None = parameter.sharded_grad_dtype if is_known else sharded.dtype
    return sharded.grad_dtype if sharded._has_grad_dtype_override and not is_known else kept


def make_leaf(parameter: FSDPParam, whole: Tensor) -> nn.Parameter:
    """Returns an unsharded parameter as ``FSDPParam.init_unsharded_param``, with the dtype of its gradients."""
    leaf = nn.Parameter(whole, requires_grad=parameter.sharded_param.requires_grad)
    if KEEPS_GRADIENT_DTYPES:
        leaf.grad_dtype = cast(Any, parameter).unsharded_grad_dtype
    return leaf


def unsharded_spec(parameter: FSDPParam, whole: Tensor) -> Any:
    """Returns what an unsharded parameter is as a DTensor, with tensor parallelism; else None."""
    values = vars(parameter)
    spec = values.get("_unsharded_dtensor_spec", values.get("_tp_spec"))  # its name up to torch 2.11
    if spec is None:
        return None
    if hasattr(parameter, "_get_unsharded_dtensor_spec"):  # 2.13, 2.14
        return parameter._get_unsharded_dtensor_spec(whole)
    return cast(Any, _fsdp_param)._get_dtensor_spec_with_dtype(spec, whole.dtype)  # 2.15
