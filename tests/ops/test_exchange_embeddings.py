"""The all-to-all of embeddings as an operator; what it computes: torchrec/test_tracing_scope_on_ranks.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.graph import Stage, TrainGraph
from graphpasses.ops.exchange_embeddings import EXCHANGE_EMBEDDINGS
from graphpasses.passes.runner import GraphPass, Numerics


@dataclass(frozen=True)
class Look(GraphPass):
    """Notes what each graph calls."""

    called: list[list[str]]
    name: ClassVar[str] = "look"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.DYNAMO, Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        self.called.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return 0


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("divisor", [1, 2])
def test_one_operator_for_dynamo_and_plain_all_to_alls_behind_it(divisor: int, is_trained: bool) -> None:
    def send(tensor: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        sent: Tensor = EXCHANGE_EMBEDDINGS(tensor, [3, 1], [2, 2], dist.group.WORLD.group_name, divisor)
        return sent

    called: list[list[str]] = []
    with fake_process_group(2):
        compiled = gp.compile(send, pipeline=gp.Pipeline((Look(called),)), inner="aot_eager")
        tensor = torch.ones(4, 5, requires_grad=is_trained)
        output = compiled(tensor)
        assert output.shape == (4, 5)
        assert output.requires_grad == is_trained
        if is_trained:
            output.sum().backward()
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape
    dynamo, joint = called
    assert dynamo == ["graphpasses.exchange_embeddings.default"]
    sent = ["_c10d_functional.all_to_all_single.default", "_c10d_functional.wait_tensor.default"]
    division = ["aten.div.Tensor"] if divisor > 1 else []
    assert joint == sent + (sent + division if is_trained else [])


def test_one_that_nobody_reads_stays() -> None:
    graph = fx.Graph()
    tensor = graph.placeholder("tensor")
    graph.call_function(EXCHANGE_EMBEDDINGS, (tensor, [1, 2], [1, 2], "group", 1))
    graph.output(tensor)
    graph.eliminate_dead_code()
    assert len(graph.find_nodes(op="call_function", target=EXCHANGE_EMBEDDINGS)) == 1
