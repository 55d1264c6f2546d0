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
from graphpasses.ops.autograd_functions import count_steps

# FBGEMM's `SparseType.FP32`.
_FP32 = 0


def emit_lookup_like(
    graph: DynamoGraph,
    call: LookupCall,
    layout: TableLayout,
    states: Sequence[fx.Node],
    bags: Mapping[str, Any],
    *,
    name: str,
) -> fx.Node:
    """Emits a lookup with the settings of ``call``, of other tables and bags; returns [B, total_D] or [N, D]."""
    aux_int, aux_bool = [list(call.arguments[key]) for key in ("aux_int", "aux_bool")]
    aux_int[INFO_B] = layout.info_b()
    aux_bool[MIXED_D] = len(set(layout.dims)) > 1
    tables = table_arguments(graph, layout, states, name)
    arguments = {**call.arguments, **tables, **bags, "aux_int": aux_int, "aux_bool": aux_bool}
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
    """Emits a lookup whose backward updates the tables, which ``weights`` holds; returns [B, total_D]."""
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
        **table_arguments(graph, layout, states, name),
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


def table_arguments(graph: DynamoGraph, layout: TableLayout, states: Sequence[fx.Node], name: str) -> dict[str, Any]:
    """Returns the arguments that tell a lookup of its tables and optimizer states; tensors become inputs.

    ``states`` are the flat tensor of the tables, then that of the optimizer's states, if it has one.
    """

    def add(values: Sequence[int], argument: str) -> fx.Node:
        return graph.add_input(torch.tensor(values), f"{name}.{argument}")

    arguments = {
        "D_offsets": graph.add_input(layout.d_offsets(), f"{name}.D_offsets"),
        "total_D": sum(layout.dims),
        "max_D": max(layout.dims),
        "hash_size_cumsum": add([*layout.first_rows, layout.num_rows], "hash_size_cumsum"),
        "total_hash_size_bits": int(math.log2(layout.num_rows) + 1),
    }
    placements = torch.full((len(layout.dims),), HOST, dtype=torch.int32)
    placed = graph.add_input(placements, f"{name}.placements")
    offsets = {"weights": layout.weights_offsets, "momentum1": layout.momentum1_offsets}
    return arguments | {
        key: [state, placed, add(values, f"{key}_offsets")]
        for state, (key, values) in zip(states, offsets.items(), strict=False)
    }
