"""Makes a lookup of FBGEMM's table-batched embeddings in a graph that has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphpasses.embedding.fused_update import FusedUpdate
from graphpasses.embedding.lookup import TableLayout, add_layout, add_states
from graphpasses.graph import DynamoGraph
from graphpasses.ops.count_steps import count_steps

__all__ = ["emit_lookup"]

# FBGEMM's `SparseType.FP32`.
_FP32 = 0


def emit_lookup(
    graph: DynamoGraph,
    layout: TableLayout,
    weights: fx.Node,
    bags: Mapping[str, Any],
    update: FusedUpdate,
    *,
    name: str,
    like: fx.Node,
) -> fx.Node:
    """Emits a lookup whose backward updates the tables.

    Args:
        graph: a ``DYNAMO`` graph.
        layout: the features and their tables.
        weights: the tables, as one flat tensor.
        bags: the op's ``indices``, ``offsets``, ``indice_weights`` and ``pooling_mode``.
        update: the optimizer.
        name: names the inputs that the graph gets.
        like: a node of the same origin.

    Returns:
        The embeddings [B, total_D].
    """
    trigger = graph.add_input(torch.empty(0, requires_grad=True), f"{name}.trigger")
    states = [weights]
    if update.arenas:
        states.append(graph.add_input(update.arenas["sum"].flat, f"{name}.sum"))
        steps = graph.add_input(update.arenas["step"].flat, f"{name}.step")
        trigger = graph.emit(count_steps, (trigger, steps), like=like)
    no_cache = graph.add_input(torch.empty(0, dtype=torch.int32), f"{name}.cache_locations")
    # The lists as FBGEMM 1.8.0's `lookup_sgd.py` and its siblings fill them.
    arguments = {
        "placeholder_autograd_tensor": trigger,
        **add_states(graph, layout, states, name),
        **add_layout(graph, layout, name),
        **bags,
        "feature_requires_grad": None,
        "output_dtype": _FP32,
        "aux_tensor": [None, None, None, no_cache, None, None, None],
        "aux_int": [0, *layout.info_b()],
        "aux_float": [0.0, 0.0],
        "aux_bool": [False] * 6 + [len(set(layout.dims)) > 1],
        "learning_rate_tensor": graph.add_input(update.learning_rate, f"{name}.learning_rate"),
        **update.form.arguments(),
    }
    op = getattr(torch.ops.fbgemm, f"split_embedding_codegen_lookup_{update.form.name}_function_pt2")
    return graph.emit(op.default, (), arguments, like=like)
