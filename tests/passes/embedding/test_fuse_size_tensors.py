"""Tensors of sizes that are sent are made by one operator; others are left alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.graph import ALL_TO_ALL, TrainGraph, argument
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.passes import BucketAllToAll, FuseSizeTensors
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import capture, exchange

aten = torch.ops.aten


def sizes(*numbers: Any) -> Tensor:
    tensors = [aten.scalar_tensor.default(number, dtype=torch.int64) for number in numbers]
    return torch.stack([torch.tensor([8, 9]), torch.stack(tensors)], 1).view([4])


def send(tensor: Tensor) -> Tensor:
    return exchange(tensor, [2, 2], [2, 2])


def run(graph: TrainGraph, *before: Any) -> tuple[int, TrainGraph, Counter[object]]:
    result = Pipeline((*before, FuseSizeTensors())).run(graph)
    counts = Counter(node.target for node in result.graph.nodes)
    return result.report["fuse-size-tensors"].num_rewrites, result, counts


def test_one_operator() -> None:
    with fake_process_group(2):
        graph = capture(lambda x: [send(sizes(*x.shape)), send(sizes(x.shape[1], 3))], torch.ones(5, 6))
        num_rewrites, result, counts = run(graph)
        assert (num_rewrites, counts[SIZE_TENSOR], counts[aten.stack.default]) == (2, 2, 0)
        made = [argument(node) for node in result.graph.find_nodes(op="call_function", target=ALL_TO_ALL)]
        assert [str(node.args[0]) for node in made] == [
            "[8, sym_size_int, 9, sym_size_int_1]",
            "[8, sym_size_int_1, 9, 3]",
        ]
        again, same, _ = run(result)
        assert (again, same.module.code) == (0, result.module.code)


def test_one_operator_for_a_bucket() -> None:
    with fake_process_group(2):
        graph = capture(lambda x: [send(sizes(*x.shape)), send(sizes(x.shape[1], 3))], torch.ones(5, 6))
        num_rewrites, _, counts = run(graph, BucketAllToAll())
        assert (num_rewrites, counts[SIZE_TENSOR], counts[ALL_TO_ALL]) == (1, 1, 1)
        assert counts[torch.ops.graphpasses.pack_all_to_all.default] == 0


def test_near_misses() -> None:
    with fake_process_group(2):

        def step(x: Tensor, ids: Tensor) -> list[Tensor]:
            received = send(sizes(*x.shape))
            # A size computed by a tensor, one received, and one that is not sent.
            return [send(sizes(*x.shape) + 1), send(received), sizes(*x.shape), send(ids)]

        graph = capture(step, torch.ones(5, 6), torch.arange(4))
        num_rewrites, result, counts = run(graph)
        assert (num_rewrites, counts[SIZE_TENSOR]) == (1, 1)
        assert [
            argument(node).target == SIZE_TENSOR
            for node in result.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
        ] == [True, False, False, False]
