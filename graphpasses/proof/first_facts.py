"""The fake values of a graph that is nobody's rewrite: what its nodes say is asked once of each kind of call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx

from graphpasses._torch.schemas import is_operator
from graphpasses.errors import ProofError
from graphpasses.proof.core.facts import Facts, leaves
from graphpasses.proof.core.views import View


class FirstFacts(Facts):
    """Facts of the first of two graphs, of which no other is known whose fake values are true.

    A pass that was not proved may have left others, or have written one that all copies of the graph share. Calls of
    one operator on inputs that lie alike, in each other's memory, too, make results that lie alike: one is computed.
    Where sizes depend on data a node is believed, as to compute its value may have the compiler guard on sizes; and
    where fake tensors cannot run a call.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._asked: dict[Hashable, Any] = {}
        super().__init__(graph)

    def note_places(self, node: fx.Node) -> None:
        if is_operator(node.target) and self._are_known(node):
            self._ask(node)
        super().note_places(node)

    def _ask(self, node: fx.Node) -> None:
        said, given = self._lies(node), self.values[node]
        if not all(view is not None and view.is_known for view, _ in said[0]):
            return
        key = node.target, self.call_of(node, is_fresh=False)
        if key not in self._asked:
            try:
                self.values[node] = self._computed(node)
            except ProofError:  # it has no fake kernel here, or is given constants
                return
            self._asked[key] = self._lies(node)
            if said == self._asked[key]:
                self.values[node] = given
        elif said != self._asked[key]:
            self.values[node] = self._computed(node)
        self.origins[node] = self._asked[key][1]

    def _are_known(self, node: fx.Node) -> bool:
        """Whether all inputs are tensors that have strides, and no sizes that depend on data."""
        places = (place for each in node.all_input_nodes for place in self.places[each])
        return all(place is not None and place.view.is_known for place in places)

    def _lies(self, node: fx.Node) -> Any:
        """Returns how, where and in whose memory the tensors of a node's value lie."""
        origins = self._origins_of(node)
        return [(View.of(fake), getattr(fake, "device", None)) for fake, _ in leaves(self.values[node])], origins
