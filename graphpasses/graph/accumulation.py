"""A captured step whose gradients wait for a later step's reduction, or that reduces what has waited with its own.

A step is captured with its reductions. Of the same capture other graphs are cut: one whose gradients leave it where
their reduction begins, and one that adds to them there what FSDP2 keeps of earlier backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses.errors import CaptureError
from graphpasses.graph.kinds import GraphInput, GraphOutput, InputKind, OutputKind
from graphpasses.graph.nodes import eliminate_dead_code, fake_value
from graphpasses.graph.update import Update

__all__ = ["PENDING", "CutGraph", "Cuts", "Waiting"]

aten = torch.ops.aten
PENDING = "unreduced gradient"


@dataclass(frozen=True)
class Waiting:
    """What one call finds: places, as FQNs of parameters and ``"group 0"``, whose gradients wait.

    Its text is the same on all ranks that find the same.
    """

    kept: tuple[str, ...] = ()  # whose gradients this call leaves unreduced
    pending: tuple[
        tuple[str, torch.dtype], ...
    ] = ()  # whose earlier ones it reduces with its own, and their dtypes

    def __str__(self) -> str:
        pending = (f"{place} ({dtype})" for place, dtype in self.pending)
        return f"to wait: {', '.join(self.kept) or 'none'}; to be reduced: {', '.join(pending) or 'none'}"


@dataclass(frozen=True)
class CutGraph:
    """A graph that was cut of a step's, and what its flat inputs and outputs are."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where a step can be cut, in its graph as it was captured."""

    module: fx.GraphModule  # the graph, with a view at each place that nothing but the reduction reads
    marks: Mapping[str, str]  # by place, the name of that view
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    update: Update | None = None  # as it was captured

    def check(self, waiting: Waiting, trained: Collection[str], *, is_updating: bool) -> None:
        """Raises if there is no such graph; ``trained`` are the FQNs of parameters that get gradients.

        Raises:
            CaptureError: what waits, or has waited, is not what the step computes.
        """
        for place in (*waiting.kept, *(place for place, _ in waiting.pending)):
            if place in self.marks:
                continue
            if place in trained:
                raise CaptureError(
                    f"the gradient of {place!r} waits, or is to wait, to be reduced, and is sharded by tensor "
                    "parallelism, too, or reduced by set_reduce_scatter_unused_params; a captured step reduces "
                    "those of each microbatch. Run the microbatches eagerly"
                )
            raise CaptureError(
                f"FSDP2 holds a gradient of {place!r} that waits to be reduced, and the captured step computes none "
                "for it, with which eager would reduce it. Run the last microbatch eagerly"
            )
        reduced = sorted(self._gradients - set(waiting.kept))
        if is_updating and waiting.kept and reduced and not any(map(_is_group, waiting.kept)):
            raise CaptureError(
                f"the gradients of {waiting.kept[0]!r} are to wait (set_requires_gradient_sync(False)), and those of "
                f"{reduced[0]!r} are not, and the step updates both. Set it for the whole model, or capture without "
                "optimizer="
            )

    @property
    def _gradients(self) -> set[str]:
        return {place for place in self.marks if not _is_group(place)}

    def graph_for(self, waiting: Waiting) -> CutGraph:
        """Returns the graph of a call in which gradients wait, or have waited."""
        graph = copy_graph(self.module.graph)
        nodes = {node.name: node for node in graph.nodes}
        marks = {place: nodes[name] for place, name in self.marks.items()}
        values: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        kept = {place: marks[place] for place in waiting.kept}
        behind = _readers(kept.values())
        values = [None if value in behind else value for value in values]
        outputs = [*self.outputs, *(GraphOutput(OutputKind.VALUE, place) for place in kept)]
        graph.output_node().args = ([*values, *(mark.args[0] for mark in kept.values())],)
        totals = {
            place: _total(graph, marks[place], dtype, is_last=_is_group(place))
            for place, dtype in waiting.pending
        }
        for place, mark in marks.items():
            mark.replace_all_uses_with(totals.get(place, mark.args[0]))
            graph.erase_node(mark)
        eliminate_dead_code(graph)
        _refresh(graph, totals.values())
        inputs = [*self.inputs, *(GraphInput(InputKind.VALUE, place, state=PENDING) for place in totals)]
        return CutGraph(lazy_module(self.module, graph), tuple(inputs), tuple(outputs))


def _is_group(place: str) -> bool:
    return place.startswith("group ")


def _readers(nodes: Iterable[fx.Node]) -> set[Any]:
    """Returns all that is computed of the values of nodes, and these."""
    found: set[Any] = set()
    pending = [*nodes]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += node.users
    return found


def _total(graph: fx.Graph, mark: fx.Node, dtype: torch.dtype, *, is_last: bool) -> fx.Node:
    """Adds a pending gradient to what a mark shows, in eager's order: the sum of a group comes after its own."""
    value = mark.args[0]
    assert isinstance(value, fx.Node)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        pending = graph.placeholder(f"pending_{mark.name}")
    fake, mode = mark.meta["val"], fake_mode_of(mark.meta["val"])
    assert mode is not None
    with mode:
        pending.meta["val"] = torch.empty_like(fake, dtype=dtype)
    with graph.inserting_before(mark):
        total = graph.call_function(aten.add.Tensor, (value, pending) if is_last else (pending, value))
    total.meta.update(mark.meta)
    total.meta["val"] = fake_value(total)
    return total


def _refresh(graph: fx.Graph, totals: Iterable[fx.Node]) -> None:
    """Computes again what is known of the values behind sums: of a reduction in another dtype than the gradients'."""
    changed = set(totals)
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node not in changed
            and not changed.isdisjoint(node.all_input_nodes)
        ):
            node.meta["val"] = fake_value(node)
            changed.add(node)
