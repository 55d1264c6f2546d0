"""The reduce-scatter as an operator; what it computes: tests/embedding/torchrec/test_batch_sizes.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.ops.reduce_scatter_v import REDUCE_SCATTER_V


@pytest.mark.parametrize("splits", [[2, 2], [1, 3]])
def test_operator_is_registered_whole(splits: list[int]) -> None:
    with fake_process_group(2):
        assert dist.group.WORLD is not None
        tensor = torch.rand(4, 3, requires_grad=True)
        output = REDUCE_SCATTER_V(tensor, splits, 1, dist.group.WORLD.group_name, 2)
        assert output.shape == (splits[1], 3)
        output.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        arguments = (tensor.detach(), splits, 1, dist.group.WORLD.group_name, 2)
        results = torch.library.opcheck(REDUCE_SCATTER_V, arguments, test_utils=checks)
        assert set(results.values()) == {"SUCCESS"}


def test_one_that_nobody_reads_stays() -> None:
    graph = fx.Graph()
    tensor = graph.placeholder("tensor")
    graph.call_function(REDUCE_SCATTER_V, (tensor, [1, 2], 0, "group", 1))
    graph.output(tensor)
    graph.eliminate_dead_code()
    assert len(graph.find_nodes(op="call_function", target=REDUCE_SCATTER_V)) == 1
