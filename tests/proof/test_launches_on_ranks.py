"""Ranks whose steps launch different collectives are told so before they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import AgreementError
from graphpasses.graph import TrainGraph, find_collectives
from graphpasses.graph.nodes import wait_of
from graphpasses.ops.pack_all_to_all import PACK
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import BucketAllToAll
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.all_to_alls import capture, evenly


@dataclass(frozen=True)
class Exchange(GraphPass):
    """Launches two collectives in the other order, on the last rank or on all."""

    name = "exchange"
    numerics = Numerics.BITWISE

    on_all: bool

    def rewrite(self, graph: TrainGraph) -> int:
        if not self.on_all and dist.get_rank() == 0:
            return 0
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        launches = sorted(find_collectives(graph.graph), key=order.__getitem__)
        one, other = next((a, b) for a, b in pairwise(launches) if order[wait_of(a)] > order[b])
        other.append(one)
        return 1


def steps() -> dict[str, str]:
    """Runs on every rank: calls a step whose collectives are exchanged, and returns what was raised."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    captured = gp.capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
    found = {}
    for name, on_all, prove in (
        ("one rank", False, None),
        ("all ranks", True, None),
        ("all ranks, proved on one", True, dist.get_rank() == 0),
    ):
        passes = (*gp.default_pipeline().passes, Exchange(on_all=on_all))
        step = Pipeline(passes).run(captured, prove=prove)
        try:
            found[name] = str(step(torch.ones(2, 4)).item())
        except AgreementError as error:
            found[name] = str(error)
    return found


@pytest.mark.multiprocess
def test_exchange_on_one_rank() -> None:
    zero, one = run_ranks(steps, 2)
    told = (
        "ranks 0 and 1 would wait for each other, or mix what they send: as collective 0 of the step, rank 0 "
        "launches _c10d_functional.all_gather_into_tensor.default(2) of 10 torch.float32 of parameter 0.weight; "
        "parameter 0.bias, rank 1 _c10d_functional.all_gather_into_tensor.default(2) of 10 torch.float32 of "
        "parameter 1.weight; parameter 1.bias. Run the same passes on all ranks; a pass must not decide "
        "by what only its rank knows"
    )
    assert zero["one rank"] == one["one rank"] == told
    # Controls: the same on all ranks is one step, and where a rank has no proof nothing is compared.
    assert float(zero["all ranks"]) == float(zero["all ranks, proved on one"]) > 0


def test_all_to_alls_that_travel_in_another_order() -> None:
    """A rank that packs and unpacks in another order proves its own graph, but does not meet the others."""
    with fake_process_group(2):
        before = capture(lambda x, y: [evenly(x * 2), evenly(y * 3)], torch.ones(2, 4), torch.ones(2, 4))
        after = Pipeline((BucketAllToAll(),)).run(before)
        one = gp.prove(before, after)
        (pack,) = after.graph.find_nodes(op="call_function", target=PACK)
        (unpack,) = (node for node in after.graph.nodes if "unpack" in str(node.target))
        pack.args = (pack.args[0][::-1], *pack.args[1:])  # type: ignore[index]
        for part in [*unpack.users]:
            part.args = (unpack, 1 - part.args[1])  # type: ignore[operator]
        two = gp.prove(before, after)
    assert one
    assert two
    assert one.launches[0].contents == two.launches[0].contents[::-1] == ("launch 0", "launch 1")
