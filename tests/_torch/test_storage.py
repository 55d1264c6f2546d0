"""Where the memory of tensors begins."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.storage import addresses


def test_views_have_the_address_of_what_they_look_at() -> None:
    table = torch.zeros(4, 2)
    assert list(addresses(table[1:].t())) == list(addresses(table)) == [table.data_ptr()]


def test_a_dtensor_lies_where_its_local_tensor_does() -> None:
    table = torch.zeros(4, 2)
    with fake_process_group(2):
        sharded = DTensor.from_local(table, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert list(addresses(sharded)) == [table.data_ptr()]


def test_what_has_no_address() -> None:
    assert [*addresses(3), *addresses(torch.eye(2).to_sparse())] == []
