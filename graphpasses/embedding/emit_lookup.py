"""Emits lookups of FBGEMM's table-batched embeddings: one like a call of the graph, or one where there was none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses.embedding.fused_update import FusedUpdate
from graphpasses.fbgemm.lookups import INFO_B, LOCATIONS, MIXED_D, LookupCall, TableLayout, placed
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
    arguments = arguments_like(call, layout, states, lambda value, key: graph.add_input(value, f"{name}.{key}"))
    assert callable(call.node.target)
    return graph.emit(call.node.target, (), {**arguments, **bags}, like=call.node)


def arguments_like(
    call: LookupCall, layout: TableLayout, states: Sequence[Any], add: Callable[[Tensor, str], Any]
) -> dict[str, Any]:
    """Returns the arguments of a lookup with the settings of ``call`` and other tables; ``add`` gets new tensors."""
    aux_int, aux_bool = [list(call.arguments[key]) for key in ("aux_int", "aux_bool")]
    aux_int[INFO_B] = layout.info_b()
    aux_bool[MIXED_D] = len(set(layout.dims)) > 1
    tables = _table_arguments(layout, states, add, call.device, call.arguments)
    return {**call.arguments, **tables, "aux_int": aux_int, "aux_bool": aux_bool}


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
    trigger = graph.add_input(torch.empty(0, requires_grad=True, device="cpu"), f"{name}.trigger")
    states = [weights]
    if update.arenas:
        states.append(graph.add_input(update.arenas["sum"].flat, f"{name}.sum"))
        arena = update.arenas["step"]
        steps = graph.add_input(arena.flat, f"{name}.step")
        places = graph.add_input(torch.tensor(arena.offsets, device="cpu"), f"{name}.step_offsets")
        trigger = graph.emit(count_steps, (trigger, steps, places), like=like)
    no_cache = graph.add_input(torch.empty(0, dtype=torch.int32, device="cpu"), f"{name}.cache_locations")
    # The lists as FBGEMM 1.8.0's `lookup_sgd.py` and its siblings fill them.
    arguments = {
        "placeholder_autograd_tensor": trigger,
        **_table_arguments(layout, states, lambda value, key: graph.add_input(value, f"{name}.{key}")),
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


def _table_arguments(
    layout: TableLayout,
    states: Sequence[Any],
    add: Callable[[Tensor, str], Any],
    device: torch.device | None = None,
    like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the arguments that tell a lookup of its tables and optimizer states; ``add`` gets their tensors.

    ``states`` are the flat tensor of the tables, then that of the optimizer's states, if it has one. ``like`` are
    arguments of a lookup on the same device, for what a GPU's lookups have beside them.
    """
    device = device or torch.device("cpu")

    def added(values: Sequence[int], key: str, dtype: torch.dtype = torch.int64) -> Any:
        return add(torch.tensor(values, dtype=dtype, device=device), key)

    arguments = {
        "D_offsets": add(layout.d_offsets().to(device), "D_offsets"),
        "total_D": sum(layout.dims),
        "max_D": max(layout.dims),
        "hash_size_cumsum": added([*layout.first_rows, layout.num_rows], "hash_size_cumsum"),
        "total_hash_size_bits": int(math.log2(layout.num_rows) + 1),
    }
    placements = added([LOCATIONS[device.type]] * len(layout.dims), "placements", torch.int32)
    offsets = {"weights": layout.weights_offsets, "momentum1": layout.momentum1_offsets}
    for state, (key, values) in zip(states, offsets.items(), strict=False):
        tables = [state, *(like[key][1:] if like else [None] * 2)]
        tables[placed(tables)] = placements, added(values, f"{key}_offsets")
        arguments[key] = tables
    return arguments
