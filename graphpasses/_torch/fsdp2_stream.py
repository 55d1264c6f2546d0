"""What FSDP2 gathers and reduces, as operators of a stream: one for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_accumulation import unreduced_gradient
from graphpasses._torch.group_ranks import group_ranks
from graphpasses._torch.operator_stream import OperatorStream
from graphpasses._torch.recorded_operator import Operator, Value, Where

GATHER, REDUCE = "fsdp.gather_parameter", "fsdp.reduce_gradient"
"""The names under which FSDP2's communication of one parameter is recorded."""


@contextmanager
def fsdp2_streamed(model: nn.Module, stream: OperatorStream) -> Iterator[None]:
    """Reports to ``stream`` what FSDP2's groups of a model gather and reduce in a block, parameter by parameter."""
    groups = fsdp_groups(model)
    for group in groups:
        vars(group).update(
            wait_for_unshard=partial(_gather, group, group.wait_for_unshard, stream),
            post_backward=partial(_reduce, group, group.post_backward, stream),
        )
    try:
        yield
    finally:
        for group in groups:
            for name in ("wait_for_unshard", "post_backward"):
                vars(group).pop(name, None)


def _gather(group: FSDPParamGroup, original: Callable[[], None], stream: OperatorStream) -> None:
    shards = {
        parameter: stream.see("shard", _local(parameter.sharded_param))
        for parameter in (group.fsdp_params if group._all_gather_result else ())
    }
    original()
    _wait(group)
    for parameter, shard in shards.items():
        whole = stream.see("parameter", _local(parameter.unsharded_param))
        _report(group, stream, GATHER, parameter, shard, whole)


def _reduce(
    group: FSDPParamGroup, original: Callable[..., None], stream: OperatorStream, *unused: Any
) -> None:
    before = {
        parameter: stream.see("gradient", _local(gradient))
        for parameter in group.fsdp_params
        if group.reduce_grads and (gradient := unreduced_gradient(parameter)) is not None
    }
    original(*unused)
    _wait(group)
    for parameter, seen in before.items():
        if parameter.sharded_param.grad is not None:
            reduced = stream.see("reduced gradient", _local(parameter.sharded_param.grad))
            _report(group, stream, REDUCE, parameter, seen, reduced)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _wait(group: FSDPParamGroup) -> None:
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)


def _report(
    group: FSDPParamGroup,
    stream: OperatorStream,
    operator: str,
    parameter: FSDPParam,
    read: Value,
    made: Value,
) -> None:
    fqn = parameter._param_fqn or parameter._module_info.param_name
    ranks = [list(group_ranks(group._reduce_scatter_process_group))]
    if operator == REDUCE and group._is_hsdp:
        ranks.append(list(group_ranks(group._all_reduce_process_group)))
    options = (f"gradient_divide_factor={group.gradient_divide_factor}",) if operator == REDUCE else ()
    stream.report(
        Operator(
            operator=operator,
            where=Where(fqn.rpartition(".")[0], None, in_backward=operator == REDUCE),
            arguments=(fqn, *(f"ranks={each}" for each in ranks), *options),
            inputs=(read,),
            outputs=(made,),
            is_collective=True,
        )
    )
