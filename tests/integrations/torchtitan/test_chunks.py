"""What our passes need of torchtitan's chunks: sums in FSDP2's order, and no node of both chunks in one's phases."""

from __future__ import annotations

import pytest
import torch
from torch import fx

pytest.importorskip("torchtitan")

aten = torch.ops.aten


def graph_of(*, role: str = "materialization", second: torch.dtype = torch.float32) -> fx.GraphModule:
    """The sum of two chunks' gradients, as torchtitan's graph chunking writes it: each is cast before."""
    graph = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    casts = []
    for chunk in range(2):
        gradient = graph.placeholder(f"gradient_{chunk}")
        with mode:
            gradient.meta["val"] = torch.empty(8, dtype=torch.bfloat16)
            dtype = second if chunk else torch.float32
            casts.append(graph.call_function(aten._to_copy.default, (gradient,), {"dtype": dtype}))
            casts[-1].meta["val"] = torch.empty(8, dtype=dtype)
    total = graph.call_function(aten.add.Tensor, tuple(casts))
    with mode:
        total.meta |= {"val": torch.empty(8), "chunked_region_role": role}
    graph.output(total)
    return fx.GraphModule({}, graph)


def test_chunks_are_added_in_the_dtype_of_their_gradients() -> None:
    from graphpasses.integrations.torchtitan.chunks import add_chunks_before_casts_pass

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(8, generator=generator).bfloat16() for _ in range(2)]
    module = graph_of()
    before = module(*gradients)
    add_chunks_before_casts_pass(module)
    added = (gradients[0] + gradients[1]).float()
    assert torch.equal(module(*gradients), added)
    assert not torch.equal(before, added)


@pytest.mark.parametrize("changes", [{"role": "body"}, {"second": torch.float64}])
def test_other_sums_stay(changes: dict[str, object]) -> None:
    from graphpasses.integrations.torchtitan.chunks import add_chunks_before_casts_pass

    module = graph_of(**changes)  # type: ignore[arg-type]
    code = str(module.graph)
    add_chunks_before_casts_pass(module)
    assert str(module.graph) == code


def test_what_both_chunks_share_is_neither_ones() -> None:
    from graphpasses.integrations.torchtitan.chunks import release_shared_nodes

    graph = fx.Graph()

    def body(chunk: int, *sources: fx.Node) -> fx.Node:
        node = graph.call_function(aten.add.Tensor, sources)
        node.meta = {"chunk_id": chunk, "chunked_region_fqn": "layers.0", "chunked_region_role": "body"}
        return node

    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    gathered = body(0, weight, weight)
    chunks = [body(chunk, x, gathered) for chunk in range(2)]
    total = body(0, *chunks)
    after = body(1, total, x)
    graph.output(after)
    release_shared_nodes(fx.GraphModule({}, graph), [weight])
    marked = [node for node in graph.nodes if "chunked_region_role" in node.meta]
    assert marked == chunks
