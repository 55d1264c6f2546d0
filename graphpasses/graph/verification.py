"""Check a graph between passes: same contract, every collective waited for, values true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpasses.errors import VerificationError
from graphpasses.graph.known_values import summary
from graphpasses.graph.nodes import WAIT, fake_value, find_collectives, is_collective
from graphpasses.graph.train_graph import InputKind, OutputKind, TrainGraph

__all__ = ["Contract", "Verifier"]


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


class Verifier:
    """Checks a graph after each pass of a pipeline.

    Args:
        graph: the graph before the passes; what it holds is taken as true.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self._contract = Contract.of(graph)
        self._known = graph.watch_values()

    def check(self, pass_name: str) -> None:
        """Raises if the graph broke its contract, or if a collective or a value is not what it must be.

        Args:
            pass_name: the pass that rewrote the graph, for the error.

        Raises:
            VerificationError: it says what is wrong and which pass left it so.
        """
        graph = self._graph
        _verify_signature(graph, self._contract, pass_name)
        for node in find_collectives(graph.graph):
            waits = [user for user in node.users if user.target == WAIT]
            if len(waits) != 1 or len(node.users) != 1:
                raise VerificationError(
                    f"{pass_name} left collective {node.name} with {len(waits)} waits and "
                    f"{len(node.users) - len(waits)} other users; expected exactly one wait"
                )
        for node in graph.graph.find_nodes(op="call_function", target=WAIT, sort=False):
            if not (isinstance(node.args[0], fx.Node) and is_collective(node.args[0])):
                raise VerificationError(
                    f"{pass_name} left {node.name} waiting for {node.args[0]}, not a collective"
                )
        for node in self._known.unknown(graph.graph):
            _verify_value(node, pass_name)
            self._known.record(node)


def _verify_signature(graph: TrainGraph, contract: Contract, pass_name: str) -> None:
    placeholders, values = graph.placeholders, graph.output_values
    if len(placeholders) != len(graph.inputs) or len(values) != len(graph.outputs):
        raise VerificationError(
            f"{pass_name} left {len(placeholders)} placeholders and {len(values)} outputs; the step describes "
            f"{len(graph.inputs)} and {len(graph.outputs)}"
        )
    for item, value in zip(graph.outputs, values, strict=True):
        if item.kind is OutputKind.LOSS and value is None:
            raise VerificationError(f"{pass_name} removed the loss")
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
            raise VerificationError(f"{pass_name} changed the step's {what}: {'; '.join(changes)}")
    if now.batch != contract.batch:
        raise VerificationError(
            f"{pass_name} changed the step's batch inputs: expected the order {', '.join(contract.batch)}, "
            f"got {', '.join(now.batch)}"
        )
    if now.num_inputs != contract.num_inputs:
        raise VerificationError(
            f"{pass_name} left {now.num_inputs} placeholders of {contract.num_inputs}; another runner passes them "
            "all (fixed_signature)"
        )
    _verify_gradients(graph, values, pass_name)


def _verify_gradients(graph: TrainGraph, values: list[Any], pass_name: str) -> None:
    stored = {fqn: placeholder.meta["val"] for fqn, placeholder in graph.parameter_placeholders()}
    for fqn, slots in graph.gradient_slots().items():
        for slot in slots:
            if fqn in stored and values[slot] is not None:
                expected, got = stored[fqn], values[slot].meta.get("val")
                if got is not None and summary(expected) != summary(got):
                    raise VerificationError(
                        f"{pass_name} left {values[slot].name} as the gradient of {fqn!r}: expected "
                        f"{summary(expected)}, got {summary(got)}"
                    )


def _verify_value(node: fx.Node, pass_name: str) -> None:
    if "val" not in node.meta:
        raise VerificationError(
            f"{pass_name} left {node.name} without meta['val']; make nodes with TrainGraph.emit"
        )
    try:
        actual = fake_value(node)
    except Exception as error:
        raise VerificationError(
            f"{pass_name} left {node.name}, which cannot run on its inputs: {type(error).__name__}: {error}"
        ) from error
    if summary(actual) != summary(node.meta["val"]):
        raise VerificationError(
            f"{pass_name} left {node.name} with meta['val'] {summary(node.meta['val'])}; "
            f"it computes {summary(actual)}"
        )
