"""The collectives that a graph launches, told alike on every rank."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import fx

from graphpasses._torch.group_ranks import named_group
from graphpasses.agreement import agree
from graphpasses.analysis.effects import collective_group
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument

__all__ = ["Launches", "is_waited_for_once"]

T = TypeVar("T")


def is_waited_for_once(launch: fx.Node) -> bool:
    """Whether a wait is the one user of a launch."""
    return [user.target for user in launch.users] == [WAIT]


class Launches:
    """The collectives of a graph in launch order; every rank has the same.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self.nodes = [node for node in graph.graph.nodes if collective_group(node) is not None]
        self.groups = list(dict.fromkeys(map(collective_group, self.nodes)))
        self._lines = [_describe(node, self.groups.index(collective_group(node))) for node in self.nodes]

    @property
    def all_to_alls(self) -> list[fx.Node]:
        """The all-to-alls that can be changed: each is waited for once."""
        return [node for node in self.nodes if node.target == ALL_TO_ALL and is_waited_for_once(node)]

    def agree(self, topic: str, facts: T, group: object) -> list[T]:
        """Returns what each rank of a group knows about these collectives, in group order.

        All ranks must call it alike, see :func:`~graphpasses.agreement.agree`.

        Args:
            topic: what the facts are about.
            facts: what this rank knows.
            group: one of ``groups``.

        Raises:
            AgreementError: the ranks launch different collectives.
        """
        signature = [f"{topic} of the {self._graph.stage.value} graph", *self._lines]
        return agree(signature, facts, model=self._graph.model, group=named_group(group))  # type: ignore[arg-type]


def _describe(node: fx.Node, group: int) -> str:
    value = argument(node).meta["val"] if isinstance(node.args[0], fx.Node) else None
    tensor = f" of {value.dtype} on {value.device.type}" if isinstance(value, torch.Tensor) else ""
    waits = "" if is_waited_for_once(node) else " (not waited for once)"
    return f"{node.target}{tensor} in process group {group}{waits}"
