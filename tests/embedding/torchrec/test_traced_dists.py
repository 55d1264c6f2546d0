"""Ids on their way to tables, traced shorter: the same ids, few symbols; eager calls in the scope are as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Compiled, ids  # first: no warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.distributed import dist_data
from torchrec.distributed.types import Awaitable
from torchrec.pt2 import checks

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.embedding.torchrec.model_call import tracing_scope


def flat(features: list[KeyedJaggedTensor]) -> Tensor:
    """All that key-jagged tensors hold, weighted by place."""
    parts = []
    for each in features:
        parts += [each.lengths().view(-1), each.values(), each.offsets(), torch.tensor(each.length_per_key())]
        parts += [each.weights() * 1000] if each.weights_or_none() is not None else []
        parts.append(torch.tensor([each.stride()]))
    joined = torch.cat([part.double() for part in parts])
    return torch.stack([joined.sum(), (joined * torch.arange(joined.numel())).sum()])


def permuted(features: KeyedJaggedTensor, order: Tensor) -> Tensor:
    return flat([features.permute([2, 0], order), features.permute([1], order[:1] * 0 + 1)])


def split(features: KeyedJaggedTensor, order: Tensor) -> Tensor:
    return flat([*features.split([3]), *features.split([1, 2])])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("call", [permuted, split])
def test_traced_as_in_eager(call: Any, is_weighted: bool) -> None:
    order = torch.tensor([2, 0], dtype=torch.int32)
    compiled = Compiled(call)
    results = []
    for rank, step in ((0, 0), (1, 0), (0, 3)):
        batch = ids(rank, step, 3, is_weighted=is_weighted)
        results.append((compiled(batch, order), call(batch, order)))
    assert all(torch.equal(*pair) for pair in results)
    assert len({tuple(eager.tolist()) for _, eager in results}) == 3
    assert compiled.backend.num_graphs == 1


def test_one_split_of_all_is_the_object_itself() -> None:
    def whole(features: KeyedJaggedTensor) -> bool:
        return features.split([2])[0] is features

    with tracing_scope():
        assert torch.compile(whole, backend="eager", fullgraph=True)(ids(0, 0, 2))


def test_eager_in_the_scope_is_as_before() -> None:
    features, order = ids(0, 0, 3), torch.tensor([2, 0], dtype=torch.int32)
    expected = permuted(features, order), split(features, order)
    with tracing_scope():
        assert all(map(torch.equal, (permuted(features, order), split(features, order)), expected))
        with fake_process_group(2):
            sent = dist_data.KJTAllToAll(torch.distributed.group.WORLD, [1, 2])(features)
    assert type(sent) is dist_data.KJTAllToAllSplitsAwaitable


class Ready(Awaitable[Tensor]):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def _wait_impl(self) -> Tensor:
        return self.value


def sizes(features: KeyedJaggedTensor) -> Tensor:
    """What a key-jagged tensor computes of its sizes, each asked for twice."""
    found = [0, 0]
    for index in range(2):
        lengths, starts = features.length_per_key(), features.offset_per_key()
        found[index] = features.stride() + 10 * features.stride_per_key()[1] + 100 * lengths[0] + 1000 * starts[1]
    return torch.ones(1) * found[0] + 7 * found[1]


def test_sizes_traced_as_in_eager() -> None:
    compiled = Compiled(sizes)
    results = [(compiled(ids(rank, step, 2)), sizes(ids(rank, step, 2))) for rank in range(2) for step in range(2)]
    assert all(torch.equal(*pair) for pair in results)
    assert len({eager.item() for _, eager in results}) > 1
    assert compiled.backend.num_graphs == 1


def test_sizes_in_the_scope_are_as_before() -> None:
    expected = sizes(ids(0, 0, 2))
    with tracing_scope():
        assert torch.equal(sizes(ids(0, 0, 2)), expected)


def waited(value: Tensor) -> Tensor:
    awaitable = Ready(value)
    awaitable.callbacks.append(lambda result: result * 2)
    result: Tensor = awaitable.wait() + checks.is_torchdynamo_compiling()
    return result


def test_waits_call_back() -> None:
    with tracing_scope():
        traced = torch.compile(waited, backend="eager", fullgraph=True)(torch.ones(2))
        eager = waited(torch.ones(2))
    assert eager.tolist() == [2, 2] == waited(torch.ones(2)).tolist()
    assert traced.tolist() == [3, 3]  # is_torchdynamo_compiling() adds one
