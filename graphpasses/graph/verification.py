"""Check a graph between passes: the rules of its stage, and what it was when it was captured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphpasses.errors import VerificationError
from graphpasses.graph.rules import FORM, RULES, Checked, Contract, Rule
from graphpasses.graph.train_graph import TrainGraph


class Verifier:
    """Checks a graph after each pass of a pipeline; what it holds before the passes is taken as true."""

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self._contract = Contract.of(graph)
        self._known = graph.watch_values()
        self._left: tuple[list[fx.Node], list[str]] = [], []
        self._is_changed = True

    @property
    def is_changed(self) -> bool:
        """Whether the nodes are others than after the last check, which many passes leave as they are."""
        return self._is_changed

    def check_form(self, pass_name: str) -> None:
        """Raises if the graph is malformed, dead code included."""
        graph = self._graph.graph
        same_nodes = len(graph.nodes) == len(self._left[0]) and self._left == self._named_nodes()
        self._is_changed = not same_nodes or bool(self._known.changed(graph))
        self._check(FORM, pass_name)

    def check_rules(self, pass_name: str) -> None:
        """Raises if a well-formed graph without dead code breaks a rule of its stage."""
        self._check(RULES, pass_name)
        if self._is_changed:
            self._left = self._named_nodes()

    def _named_nodes(self) -> tuple[list[fx.Node], list[str]]:
        nodes = [*self._graph.graph.nodes]
        return nodes, [node.name for node in nodes]

    def _check(self, rules: Sequence[Rule], pass_name: str) -> None:
        checked = Checked(self._graph, self._contract, self._known, self._is_changed)
        for rule in rules:
            if self._graph.stage in rule.stages:
                for broken in rule.check(checked):
                    raise VerificationError(f"{pass_name} {broken.message}") from broken.cause
