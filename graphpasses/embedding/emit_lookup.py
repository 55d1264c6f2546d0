"""Emits lookups of FBGEMM's table-batched embeddings: one like a call of the graph, or one where there was none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses.embedding.fused_update import FusedUpdate
from graphpasses.fbgemm.lookups import HOST, INFO_B, MIXED_D, LookupCall, TableLayout
from graphpasses.fbgemm.names import fused_lookup
from graphpasses.graph import DynamoGraph
from graphpasses.ops.count_steps import count_steps

# FBGEMM's `SparseType.FP32`.
_FP32 = 0


def emit_lookup_like(
    graph: DynamoGraph,
    call: LookupCall,
    layout: TableLayout,
    states: Sequence[fx.Node],
    *,
    indices: fx.Node,
    offsets: fx.Node,
    indice_weights: fx.Node | None,
    name: str,
) -> fx.Node:
    """Emits a lookup like ``call`` on other tables, at the graph's insertion point; returns [B, total_D] or [N, D].

    The new lookup has the optimizer, pooling and settings of ``call``. ``states`` are the flat tensor of the tables,
    then that of the optimizer's states, if it has one. ``indices`` and ``indice_weights`` are [N]; ``offsets`` say
    where each bag begins in them, and the end [features * B + 1]. The graph gets inputs for what follows from
    ``layout``, named by ``name``.
    """
    aux_int, aux_bool = [list(call.arguments[key]) for key in ("aux_int", "aux_bool")]
    aux_int[INFO_B] = layout.info_b()
    aux_bool[MIXED_D] = len(set(layout.dims)) > 1
    arguments = {
        **call.arguments,
        **layout_arguments(graph, layout, name),
        **state_arguments(graph, layout, states, name),
        "indices": indices,
        "offsets": offsets,
        "indice_weights": indice_weights,
        "aux_int": aux_int,
        "aux_bool": aux_bool,
    }
    assert callable(call.node.target)
    return graph.emit(call.node.target, (), arguments, like=call.node)


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
    """Emits a lookup whose backward updates the tables; returns the embeddings [B, total_D].

    ``weights`` holds the tables as one flat tensor; ``bags`` are the op's ``indices``, ``offsets``,
    ``indice_weights`` and ``pooling_mode``. ``name`` names the inputs that the graph gets; nodes have the origin of
    ``like``.
    """
    trigger = graph.add_input(torch.empty(0, requires_grad=True), f"{name}.trigger")
    states = [weights]
    if update.arenas:
        states.append(graph.add_input(update.arenas["sum"].flat, f"{name}.sum"))
        arena = update.arenas["step"]
        steps = graph.add_input(arena.flat, f"{name}.step")
        places = graph.add_input(torch.tensor(arena.offsets), f"{name}.step_offsets")
        trigger = graph.emit(count_steps, (trigger, steps, places), like=like)
    no_cache = graph.add_input(torch.empty(0, dtype=torch.int32), f"{name}.cache_locations")
    # The lists as FBGEMM 1.8.0's `lookup_sgd.py` and its siblings fill them.
    arguments = {
        "placeholder_autograd_tensor": trigger,
        **state_arguments(graph, layout, states, name),
        **layout_arguments(graph, layout, name),
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
    return graph.emit(fused_lookup(update.form.name), (), arguments, like=like)


def layout_arguments(graph: DynamoGraph, layout: TableLayout, name: str) -> dict[str, Any]:
    """Returns the arguments that say the dimensions and rows of features; tensors become inputs of the graph."""
    hash_size_cumsum = torch.tensor([*layout.first_rows, layout.num_rows])
    return {
        "D_offsets": graph.add_input(layout.d_offsets(), f"{name}.D_offsets"),
        "total_D": sum(layout.dims),
        "max_D": max(layout.dims),
        "hash_size_cumsum": graph.add_input(hash_size_cumsum, f"{name}.hash_size_cumsum"),
        "total_hash_size_bits": int(math.log2(layout.num_rows) + 1),
    }


def state_arguments(
    graph: DynamoGraph, layout: TableLayout, states: Sequence[fx.Node], name: str
) -> dict[str, list[fx.Node]]:
    """Returns the arguments that tell a lookup where its tables and optimizer states lie.

    Offsets become inputs of the graph. ``states`` are as in :func:`emit_lookup_like`.
    """
    placements = torch.full((len(layout.dims),), HOST, dtype=torch.int32)
    placed = graph.add_input(placements, f"{name}.placements")
    offsets = {"weights": layout.weights_offsets, "momentum1": layout.momentum1_offsets}
    return {
        key: [state, placed, graph.add_input(torch.tensor(values), f"{name}.{key}_offsets")]
        for state, (key, values) in zip(states, offsets.items(), strict=False)
    }
