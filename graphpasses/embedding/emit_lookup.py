"""Makes lookups of FBGEMM's table-batched embeddings in a graph that has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses.embedding.fused_update import FusedUpdate, count_steps
from graphpasses.embedding.lookup import TableLayout, add_layout, add_states
from graphpasses.graph import TrainGraph

__all__ = ["emit_dense_lookup", "emit_fused_lookup", "join_tables"]

# FBGEMM's `SparseType.FP32`.
_FP32 = 0


class _JoinTables(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, offsets: Sequence[int], *tables: Tensor) -> Tensor:
        ctx.places = [(offset, table.shape) for offset, table in zip(offsets, tables, strict=True)]
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts = [grad[offset : offset + shape.numel()].view(shape) for offset, shape in ctx.places]
        return None, None, *parts


def join_tables(flat: Tensor, offsets: Sequence[int], *tables: Tensor) -> Tensor:
    """Returns ``flat``; the gradients of the tables are parts of its gradient.

    Args:
        flat: the memory in which the tables lie, 1-D.
        offsets: where in it each table begins, in elements.
        tables: the tables.
    """
    apply: Callable[..., Tensor] = _JoinTables.apply
    return apply(flat, offsets, *tables)


def emit_dense_lookup(
    graph: TrainGraph,
    layout: TableLayout,
    weights: fx.Node,
    bags: Mapping[str, Any],
    *,
    name: str,
    like: fx.Node,
) -> fx.Node:
    """Emits a lookup to which autograd gives a gradient as large as the tables.

    Args:
        graph: a ``MODEL`` graph.
        layout: the features and their tables.
        weights: the tables, as one flat tensor.
        bags: the op's ``indices``, ``offsets``, ``indice_weights`` and ``pooling_mode``.
        name: names the inputs that the graph gets.
        like: a node of the same origin.

    Returns:
        The embeddings [B, total_D].
    """
    arguments = {
        "dev_weights": weights,
        "weights_offsets": graph.add_input(torch.tensor(layout.weights_offsets), f"{name}.weights_offsets"),
        **add_layout(graph, layout, name),
        **bags,
        "feature_requires_grad": None,
    }
    return graph.emit(
        torch.ops.fbgemm.dense_embedding_codegen_lookup_function.default, (), arguments, like=like
    )


def emit_fused_lookup(
    graph: TrainGraph,
    layout: TableLayout,
    weights: fx.Node,
    bags: Mapping[str, Any],
    update: FusedUpdate,
    *,
    name: str,
    like: fx.Node,
) -> fx.Node:
    """Emits a lookup whose backward updates the tables; arguments as in :func:`emit_dense_lookup`.

    Args:
        graph: as above.
        layout: as above.
        weights: as above.
        bags: as above.
        update: the optimizer.
        name: as above.
        like: as above.
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
