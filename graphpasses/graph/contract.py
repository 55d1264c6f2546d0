"""What no pass may change: what a graph reads, whose gradients it yields, which operators write."""

from __future__ import annotations

from dataclasses import dataclass

from graphpasses.graph.nodes import writing_operators
from graphpasses.graph.train_graph import InputKind, TrainGraph
from graphpasses.ops.update_rows import UPDATE_ROWS


@dataclass(frozen=True)
class Contract:
    """What no pass may change: what the step reads, and whose gradients it yields."""

    state: frozenset[str]  # canonical FQNs of the parameters and buffers that are inputs
    batch: tuple[str, ...]  # paths of the batch leaves, in order
    num_inputs: int | None  # number of placeholders, if another runner owns the flat signature; else None
    gradients: frozenset[str]  # canonical FQNs of the parameters that get a gradient
    # Operators that write an argument in place, also in the step's update, wherever that is, and what may
    # replace a part of it.
    writers: frozenset[str]

    @classmethod
    def of(cls, graph: TrainGraph) -> Contract:
        """Returns the contract that ``graph`` fulfils now."""
        return cls(
            state=frozenset(graph.identity.canonical(item.fqn) for item in graph.inputs if item.is_state),
            batch=tuple(item.fqn for item in graph.inputs if item.kind is InputKind.BATCH),
            num_inputs=len(graph.inputs) if graph.fixed_signature else None,
            gradients=frozenset(graph.parameters) - graph.without_gradient,
            writers=writing_operators(graph.graph).union(
                ()
                if graph.update is None
                else (str(UPDATE_ROWS), *writing_operators(graph.update.module.graph))
            ),
        )
