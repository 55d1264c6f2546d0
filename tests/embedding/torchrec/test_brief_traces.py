"""TorchRec's functions that are traced in fewer steps: they do what the originals do, traced and in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Compiled, ids  # first: loads TorchRec without its warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.distributed import dist_data, embeddingbag
from torchrec.distributed.logging_handlers import EventLoggingHandler
from torchrec.distributed.types import Awaitable
from torchrec.pt2 import checks

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.embedding.torchrec.model_call import tracing_scope


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
        found[index] = (
            features.stride() + 10 * features.stride_per_key()[1] + 100 * lengths[0] + 1000 * starts[1]
        )
    return torch.ones(1) * found[0] + 7 * found[1]


def waited(value: Tensor) -> Tensor:
    awaitable = Ready(value)
    awaitable.callbacks.append(lambda result: result * 2)
    with embeddingbag.maybe_annotate_embedding_event(embeddingbag.EmbeddingEvent.LOOKUP, "fqn", "table_wise"):
        result: Tensor = awaitable.wait() + checks.is_torchdynamo_compiling()
    return result


def test_traced_as_in_eager() -> None:
    compiled = Compiled(sizes)
    results = [
        (compiled(ids(rank, step, 2)), sizes(ids(rank, step, 2))) for rank in range(2) for step in range(2)
    ]
    assert all(torch.equal(*pair) for pair in results)
    assert len({eager.item() for _, eager in results}) > 1
    assert compiled.backend.num_graphs == 1


def test_waits_call_back() -> None:
    with tracing_scope():
        traced = torch.compile(waited, backend="eager", fullgraph=True)(torch.ones(2))
        eager = waited(torch.ones(2))
    assert eager.tolist() == [2, 2] == waited(torch.ones(2)).tolist()
    assert traced.tolist() == [3, 3]  # is_torchdynamo_compiling() adds one


def test_eager_in_the_scope_is_as_before() -> None:
    features = ids(0, 0, 2)
    expected = sizes(ids(0, 0, 2))
    event = embeddingbag.EmbeddingEvent.LOOKUP
    with tracing_scope():
        assert torch.equal(sizes(features), expected)
        named = embeddingbag.maybe_annotate_embedding_event(event, "fqn", "table_wise")
        logged = EventLoggingHandler.n_batch_log_event_context("component", "event")
        assert not isinstance(named, nullcontext)
        assert not isinstance(logged, nullcontext)
        assert not dist_data.is_torchdynamo_compiling()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_checked", [False, True])
def test_sent_splits_are_read_where_they_are_checked(
    monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    monkeypatch.setattr(dist_data, "_TORCHREC_OVERFLOW_DEBUG", is_checked)
    monkeypatch.setattr(dist_data, "_check_int_overflow", lambda *args, **kwargs: False)
    graphs: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return lambda *values: (torch.ones(2),)

    def exchange(sent: Tensor) -> Tensor:
        received = dist_data.SplitsAllToAllAwaitable([sent, sent], dist.group.WORLD).wait()
        return sum((torch.ones(2) * size for row in received for size in row), torch.zeros(2))

    with fake_process_group(2), tracing_scope():
        torch.compile(exchange, backend=backend, fullgraph=True)(torch.tensor([3, 4]))
    (graph,) = graphs
    views = [node for node in graph.nodes if node.target == "view"]
    assert len(views) == 1 + is_checked
