"""What stands on a parameter and runs in backward."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from graphpasses._torch.module_hooks import have_hooks, hooks_in_backward
from graphpasses._torch.optimizers import (
    has_step_hooks,
    optimizers_in_backward,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map


def test_optimizers_and_who_steps_them() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert optimizers_in_backward(parameter) == ()
    assert not hooks_in_backward(parameter)
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1}, register_hook=False)
    assert not hooks_in_backward(parameter)
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert [type(optimizer) for optimizer in optimizers_in_backward(parameter)] == [torch.optim.SGD] * 2
    assert hooks_in_backward(parameter)
    for handle in param_to_optim_hook_handle_map[parameter]:  # as DistributedDataParallel does
        handle.remove()
    assert not hooks_in_backward(parameter)


def test_hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert not have_hooks([parameter])
    assert not has_step_hooks(optimizer)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda tensor: None)
        assert have_hooks([parameter])
        handle.remove()
        assert not have_hooks([parameter])
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *args: None)
        assert has_step_hooks(optimizer)
        handle.remove()
        assert not has_step_hooks(optimizer)
