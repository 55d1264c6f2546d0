"""Sparse tensors that a step reads, as the adjacency of a graph: their elements are counted, drawn and dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpasses import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits


def adjacency(seed: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).relu().to_sparse()


def with_elements_dropped(graph: torch.Tensor) -> torch.Tensor:
    """As RecBole's SparseDropout, and NGCF's node dropout."""
    keep = torch.floor(torch.rand(graph._nnz()) + 0.5).bool()
    return torch.sparse_coo_tensor(graph._indices()[:, keep], graph._values()[keep] / 0.5, graph.shape)


class GraphNet(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.place, graph = nn.Linear(4, 4), place, adjacency(0)
        if place == "buffer":
            self.register_buffer("graph", graph)
        elif place == "attribute":
            self.graph = graph
        else:
            self.graphs = [graph]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = self.graphs[0] if self.place == "list" else self.graph
        return torch.sparse.mm(with_elements_dropped(graph), self.linear(x)).square().mean() / graph._nnz()


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
def test_elements_that_are_counted(place: str) -> None:
    """With others, written in place or put in its place, the step is captured again. Control: other draws."""
    model, x = GraphNet(place), torch.randn(6, 4)
    step = capture_train_step(lambda model, x: model(x), model, x)
    for seed in range(3):
        for _ in range(2):
            state = torch.get_rng_state()
            loss = step(x)
            torch.set_rng_state(state)
            assert torch.equal(loss, model(x))
            assert not torch.equal(loss, model(x))
        step.check(x)
        if place == "list" or seed:
            (model.graphs[0] if place == "list" else model.graph).copy_(adjacency(seed + 1))
        else:
            model.graph = adjacency(seed + 1)
    counts = {adjacency(seed)._nnz() for seed in range(3)}
    assert len(step.captures) == len(counts) == 3


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_buffers_are_checked(layout: torch.layout) -> None:
    model, graph = nn.Linear(4, 4), adjacency(0).to_sparse(layout=layout)
    model.register_buffer("graph", graph)
    step = capture_train_step(lambda model, x: (model.graph @ model(x)).sum(), model, torch.randn(6, 4))
    step.check(torch.randn(6, 4))
    assert same_bits(graph, graph.clone())
    assert not any(same_bits(graph, other) for other in (2 * graph, graph.to_dense(), adjacency(1)))


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_tensors_from_outside(layout: torch.layout) -> None:
    """They are none that ``loss_fn`` makes."""
    graph = adjacency(0).to_sparse(layout=layout)
    with pytest.raises(
        CaptureError, match=r"loss_fn reads a compressed sparse tensor .* at .*test_sparse_tensors\.py"
    ):
        capture_train_step(lambda model, x: (graph @ model(x)).sum(), nn.Linear(4, 4), torch.randn(6, 4))
