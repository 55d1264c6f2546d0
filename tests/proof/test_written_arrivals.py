"""What a collective brought may be written in part: its memory holds that, however many were launched before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import ProofError

collectives = torch.ops._c10d_functional


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    came = collectives.wait_tensor(collectives.all_reduce(x, "sum", "0"))
    came[:1].add_(x[:1])  # as ring attention adds gradients to what another rank sends
    loss: torch.Tensor = (model(x) * came).sum()
    return loss


@pytest.mark.parametrize("is_other", [False, True])
def test_one_more_launch_before_it(is_other: bool) -> None:
    with fake_process_group(2):
        step = gp.capture_train_step(loss_of, nn.Linear(3, 3), torch.ones(2, 3))
        after = step.copy()
        (launch,) = after.graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        with after.graph.inserting_before(launch):
            more = after.emit(collectives.all_reduce.default, (launch.args[0], "max", "0"), like=launch)
            came = after.emit(collectives.wait_tensor.default, (more,), like=launch)
        if is_other:
            launch.replace_input_with(launch.args[0], came)
            with pytest.raises(ProofError, match=r"the rewritten step .* the loss"):
                gp.prove(step, after)
            return
        assert not gp.prove(step, after).unproved
