"""gloo's functional all-gathers: the call that they take."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphpasses._torch import gloo


def launched(tensor: torch.Tensor, *, is_mended: bool) -> tuple[torch.Tensor, set[str]]:
    """Returns what a functional all-gather gives, and the collectives that were launched."""
    assert dist.group.WORLD is not None
    arguments = (1, dist.group.WORLD.group_name)
    with torch.profiler.profile() as profile:
        if is_mended:
            gathered = gloo.ALL_GATHER(tensor, *arguments)
        else:
            [gathered] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced([tensor], *arguments)
        result = torch.ops._c10d_functional.wait_tensor(gathered)
    return result, {event.name for event in profile.events() if event.name.startswith("c10d::")}


@pytest.mark.parametrize("shape", [(4,), (3, 2), (0, 2)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_all_gather_has_a_name_that_corrupts_no_memory(shape: tuple[int, ...], requires_grad: bool) -> None:
    """The control is torch's own, whose name has memory that two threads may free."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.rand(shape, requires_grad=requires_grad)
        result, names = launched(tensor, is_mended=True)
        theirs, their_names = launched(tensor.detach(), is_mended=False)
    finally:
        dist.destroy_process_group()
    assert names == {"c10d::_allgather_base_"}
    assert their_names == {"c10d::allgather_into_tensor_coalesced_"}
    assert torch.equal(result, theirs)


def test_other_backends_gather_as_before() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _, names = launched(torch.rand(4), is_mended=True)
    finally:
        dist.destroy_process_group()
    assert names == {"c10d::allgather_into_tensor_coalesced_"}
