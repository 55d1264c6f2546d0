"""Check a graph between passes: same contract, every collective waited for, values true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpasses.errors import VerificationError
from graphpasses.graph.nodes import WAIT, fake_value, find_collectives, is_collective
from graphpasses.graph.train_graph import InputKind, OutputKind, TrainGraph

__all__ = ["Contract", "verify"]


@dataclass(frozen=True)
class Contract:
    """What no pass may change: what the step reads, and whose gradients it yields.

    Args:
        state: canonical FQNs of the parameters and buffers that are inputs.
        batch: paths of the batch leaves, in order.
        num_inputs: number of placeholders, if another runner owns the flat signature; else None.
        gradients: canonical FQNs of the parameters that get a gradient.
    """

    state: frozenset[str]
    batch: tuple[str, ...]
    num_inputs: int | None
    gradients: frozenset[str]

    @classmethod
    def of(cls, graph: TrainGraph) -> Contract:
        """Returns the contract that ``graph`` fulfils now.

        Args:
            graph: the step.
        """
        return cls(
            state=frozenset(graph.identity.canonical(item.fqn) for item in graph.inputs if item.is_state),
            batch=tuple(item.fqn for item in graph.inputs if item.kind is InputKind.BATCH),
            num_inputs=len(graph.inputs) if graph.fixed_signature else None,
            gradients=frozenset(graph.parameters) - graph.without_gradient,
        )


def verify(graph: TrainGraph, contract: Contract, culprit: str) -> None:
    """Raises if the graph broke the contract, or if a collective or a value is not what it must be.

    Args:
        graph: the step after a pass, well formed (linted).
        contract: what it must fulfil.
        culprit: names the pass, for the error.

    Raises:
        VerificationError: it says what is wrong and which pass left it so.
    """
    _verify_signature(graph, contract, culprit)
    for node in find_collectives(graph.graph):
        waits = [user for user in node.users if user.target == WAIT]
        if len(waits) != 1 or len(node.users) != 1:
            raise VerificationError(
                f"{culprit} left collective {node.name} with {len(waits)} waits and "
                f"{len(node.users) - len(waits)} other users; expected exactly one wait"
            )
    for node in graph.graph.find_nodes(op="call_function", target=WAIT, sort=False):
        if not (isinstance(node.args[0], fx.Node) and is_collective(node.args[0])):
            raise VerificationError(
                f"{culprit} left {node.name} waiting for {node.args[0]}, not a collective"
            )
    for node in _unknown_values(graph):
        _verify_value(node, culprit)
        graph.mark_value_known(node)


def _unknown_values(graph: TrainGraph) -> list[fx.Node]:
    """Returns the calls that were changed since they were recorded, and those that read another kind of value."""
    found: dict[fx.Node, None] = {}
    for node in graph.graph.nodes:
        if graph.is_value_known(node):
            continue
        found[node] = None
        before, now = graph.recorded_value(node), node.meta.get("val")
        if before is not None and before is not now and _summary(before) != _summary(now):
            found.update(dict.fromkeys(node.users))
    return [node for node in found if node.op == "call_function"]


def _verify_signature(graph: TrainGraph, contract: Contract, culprit: str) -> None:
    placeholders, values = graph.placeholders, graph.output_values
    if len(placeholders) != len(graph.inputs) or len(values) != len(graph.outputs):
        raise VerificationError(
            f"{culprit} left {len(placeholders)} placeholders and {len(values)} outputs; the step describes "
            f"{len(graph.inputs)} and {len(graph.outputs)}"
        )
    for item, value in zip(graph.outputs, values, strict=True):
        if item.kind is OutputKind.LOSS and value is None:
            raise VerificationError(f"{culprit} removed the loss")
    now = Contract.of(graph)
    for what, before, after in (
        ("inputs", contract.state, now.state),
        ("batch inputs", frozenset(contract.batch), frozenset(now.batch)),
        ("gradients", contract.gradients, now.gradients),
    ):
        if before != after:
            lost, gained = sorted(before - after), sorted(after - before)
            changes = [f"lost {', '.join(lost)}"] * bool(lost) + [f"gained {', '.join(gained)}"] * bool(
                gained
            )
            raise VerificationError(f"{culprit} changed the step's {what}: {'; '.join(changes)}")
    if now.batch != contract.batch:
        raise VerificationError(
            f"{culprit} changed the step's batch inputs: expected the order {', '.join(contract.batch)}, "
            f"got {', '.join(now.batch)}"
        )
    if now.num_inputs != contract.num_inputs:
        raise VerificationError(
            f"{culprit} left {now.num_inputs} placeholders of {contract.num_inputs}; another runner passes them "
            "all (fixed_signature)"
        )
    _verify_gradients(graph, values, culprit)


def _verify_gradients(graph: TrainGraph, values: list[Any], culprit: str) -> None:
    stored = {fqn: placeholder.meta["val"] for fqn, placeholder in graph.parameter_placeholders()}
    for fqn, slots in graph.gradient_slots().items():
        for slot in slots:
            if fqn in stored and values[slot] is not None:
                expected, got = stored[fqn], values[slot].meta.get("val")
                if got is not None and _summary(expected) != _summary(got):
                    raise VerificationError(
                        f"{culprit} left {values[slot].name} as the gradient of {fqn!r}: expected "
                        f"{_summary(expected)}, got {_summary(got)}"
                    )


def _verify_value(node: fx.Node, culprit: str) -> None:
    if "val" not in node.meta:
        raise VerificationError(
            f"{culprit} left {node.name} without meta['val']; make nodes with TrainGraph.emit"
        )
    try:
        actual = fake_value(node)
    except Exception as error:
        raise VerificationError(
            f"{culprit} left {node.name}, which cannot run on its inputs: {type(error).__name__}: {error}"
        ) from error
    if _summary(actual) != _summary(node.meta["val"]):
        raise VerificationError(
            f"{culprit} left {node.name} with meta['val'] {_summary(node.meta['val'])}; "
            f"it computes {_summary(actual)}"
        )


def _summary(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (_summary(value.shape), value.dtype, value.device)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr  # to compare the values themselves would guard on them
    if isinstance(value, (list, tuple)):
        return tuple(map(_summary, value))
    if isinstance(value, Mapping):
        return {key: _summary(item) for key, item in value.items()}
    return value
