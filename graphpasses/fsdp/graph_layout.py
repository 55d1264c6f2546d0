"""The bucket layout that a graph has, read from its collectives and the splits after them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpasses.analysis.parameter_collectives import (
    AFTER_REDUCTION,
    ALL_REDUCES,
    REDUCE_SCATTERS,
    before_padding,
    calls,
    collective_ranks,
    is_result_of,
)
from graphpasses.errors import LayoutError
from graphpasses.fsdp.layout import BucketLayout, Collective, Layout, LayoutEntry, with_entries
from graphpasses.graph import WAIT, TrainGraph, argument
from graphpasses.graph.parameters import ParameterInfo

aten = torch.ops.aten
SPLIT = aten.split_with_sizes.default

# What undoes casts, padding and the mean's divisor; a gradient's bytes keep their place in all of them.
_KEEP_PLACE = AFTER_REDUCTION | {aten.div.Scalar}
UNPACK_OPS = _KEEP_PLACE | {WAIT, SPLIT, operator.getitem}
"""What stands between the launch of a reduction, packed or not, and the gradients that a step returns."""


def graph_layout(graph: TrainGraph) -> Layout:
    """Reads which gradient sits at which byte of which reduction of a captured, possibly rewritten, step.

    Args:
        graph: the step; its process groups must be alive on this rank.

    Returns:
        One bucket per reduction over an FSDP group, or HSDP's other one, that a gradient output depends on, in the
        order of the graph.

    Raises:
        LayoutError: a bucket holds a part that belongs to no gradient output.

    Example:
        >>> with fake_process_group(2):
        ...     model = graphpasses.simple_fsdp(nn.Linear(4, 4), dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     layout = graph_layout(step)
        >>> [[(entry.fqn, entry.offset) for entry in bucket.entries] for bucket in layout.buckets]
        [[('bias', 0)], [('weight', 0)]]
    """
    parts = reduced_parts(graph)
    return Layout(tuple(_bucket(graph, node, parts[node]) for node in parts))


def reduced_parts(graph: TrainGraph) -> dict[fx.Node, dict[int, tuple[str, tuple[int, ...]]]]:
    """Returns the parts of each reduction of gradients, in the order of the graph.

    By the node that launches it and the part's number: FQN, and the numbers of elements of all parts.
    """
    parts: dict[fx.Node, dict[int, tuple[str, tuple[int, ...]]]] = {}
    for fqn, found in graph.gradients().items():
        for gradient in found.values():
            for collective, part, sizes in _collectives_behind(gradient, graph.parameters[fqn]):
                parts.setdefault(collective, {})[part] = fqn, sizes
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    return {node: parts[node] for node in sorted(parts, key=order.__getitem__)}


def _collectives_behind(value: fx.Node, info: ParameterInfo) -> Iterator[tuple[fx.Node, int, tuple[int, ...]]]:
    """Yields the collectives on the way from a gradient output to the gradient.

    With the parameter's part among those into which the result is split, and the numbers of elements of all parts.
    """
    pending: list[tuple[Any, int, tuple[int, ...]]] = [(value, 0, ())]
    while pending:
        node, part, sizes = pending.pop()
        if calls(node, operator.getitem) and calls(node.args[0], SPLIT):
            split, index = argument(node), node.args[1]
            assert isinstance(index, int)
            pending.append((split.args[0], index, tuple(part.shape[0] for part in split.meta["val"])))
        elif is_result_of(node, ALL_REDUCES, info.replicate_ranks):
            yield argument(node), part, sizes or (_numel(node),)
            # HSDP: the reduce-scatter comes first, same places; then what earlier microbatches left is added.
            source = argument(node).args[0]
            while isinstance(source, fx.Node) and source.target in (aten.add.Tensor, *_KEEP_PLACE):
                source = argument(source)
            if is_result_of(source, REDUCE_SCATTERS, info.shard_ranks):
                pending.append((source, part, sizes))
        elif is_result_of(node, REDUCE_SCATTERS, info.shard_ranks):
            yield argument(node), part, sizes or (_numel(node),)
            if not sizes:  # HSDP as traced: the all-reduce comes first, on the whole gradient
                source, _ = before_padding(argument(node))
                if is_result_of(source, ALL_REDUCES, info.replicate_ranks):
                    yield argument(source), 0, (_numel(source),)
        elif isinstance(node, fx.Node) and node.target in _KEEP_PLACE:
            pending.append((node.args[0], part, sizes))
        elif calls(node, aten.add.Tensor):
            pending += [(source, part, sizes) for source in reversed(node.all_input_nodes)]


def _bucket(graph: TrainGraph, collective: fx.Node, parts: dict[int, tuple[str, tuple[int, ...]]]) -> BucketLayout:
    sizes = next(iter(parts.values()))[1]
    missing = set(range(len(sizes))) - set(parts)
    if missing:
        known = ", ".join(fqn for fqn, _ in parts.values())
        raise LayoutError(
            f"{collective.name} packs {len(sizes)} parts, but part {min(missing)} reaches no gradient output; "
            f"the others are {known}"
        )
    dtype: torch.dtype = argument(collective).meta["val"].dtype
    entries = []
    for index, padded_numel in enumerate(sizes):
        info = graph.parameters[parts[index][0]]
        dim = info.shard_dim or 0
        entries.append(LayoutEntry(info.fqn, math.prod(info.shape), padded_numel, 0, dim, info.shape[dim]))
    kind: Collective = "reduce_scatter" if collective.target in REDUCE_SCATTERS else "all_reduce"
    name = str(dtype).removeprefix("torch.")
    return with_entries(BucketLayout(kind, collective_ranks(collective), str(collective.args[1]), name, ()), entries)


def _numel(node: Any) -> int:
    return int(node.meta["val"].numel())
