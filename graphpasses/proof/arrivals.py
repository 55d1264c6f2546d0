"""What collectives have still to bring, or to send, and memory that is freed: who touches it depends on chance."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import fx

from graphpasses.analysis.effects import written_inputs
from graphpasses.graph import WAIT, argument
from graphpasses.graph.nodes import METADATA_OPS
from graphpasses.proof.calls import Calls
from graphpasses.proof.core.facts import Leaf, Place
from graphpasses.proof.core.values import Value

_READS_NONE = METADATA_OPS | {WAIT}


class Arrivals(Calls):
    """Notes what depends on chance, in ``broken``: the node, and how."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._broken: list[tuple[fx.Node, str]] = []
        # Launches by the memory of what they bring, until someone waits: torch then waits for all of one memory.
        self._waiting: dict[Leaf, list[fx.Node]] = {}
        self._freed: dict[Leaf, fx.Node] = {}

    def _launch_into(self, node: fx.Node) -> None:
        """Notes a launch whose result nobody has waited for."""
        for memory in self._memories(node):
            self._waiting.setdefault(memory, []).append(node)

    def _wait_for(self, node: fx.Node) -> None:
        for memory in self._memories(argument(node)):
            self._waiting.pop(memory, None)

    def _free(self, freed: fx.Node, by: fx.Node) -> None:
        self._freed.update(dict.fromkeys(self._memories(freed), by))

    def _launched(self) -> dict[fx.Node, None]:
        """Returns the launches for which nobody has waited."""
        return dict.fromkeys(itertools.chain.from_iterable(self._waiting.values()))

    def _look_for_chance(self, node: fx.Node) -> None:
        """Notes if an operator reads memory that another has freed, or has still to fill; a view reads none."""
        if not (self._freed or self._waiting) or node.target in _READS_NONE:
            return
        writes = written_inputs(node)  # of which it is told where they are written
        seen = set() if writes or node.op == "output" else self._memories(node)
        for source in node.all_input_nodes:
            for memory in self._memories(source) - seen if source not in writes else ():
                if memory in self._freed:
                    self._note(self._freed[memory], f"frees {source.name}", node)
                for launch in self._waiting.get(memory, ()):
                    if self._meet(self._facts.places[launch], self._facts.places[source]):
                        self._note(launch, f"brings, before anyone has waited, {source.name}", node)

    def _note(self, by: fx.Node, does: str, reader: fx.Node) -> None:
        self._broken.append((by, f"{by.name} {does}, which {reader.name} reads"))

    def write_tensor(self, place: Place, value: Value, by: fx.Node) -> None:
        """Notes also if a collective still reads what is there, or has still to write there."""
        for launch in self._launched():
            for source in (launch, *launch.all_input_nodes):
                if self._meet([place], self._facts.places[source]):
                    does = "brings" if source is launch else "sends"
                    reason = f"{by.name} writes what {launch.name} {does}, before anyone has waited for it"
                    self._broken.append((by, reason))
        super().write_tensor(place, value, by)

    def _memories(self, node: fx.Node) -> set[Leaf]:
        return set(map(self._memory_of, self._roots(node)))

    def _meet(self, some: Iterable[Place | None], others: Iterable[Place | None]) -> bool:
        """Whether tensors of both may have bytes in common."""
        sides = [*zip(some, itertools.repeat(0)), *zip(others, itertools.repeat(1))]
        pairs = self._touching((place, side, None) for place, side in sides if place is not None)
        return any(one[1] != two[1] for one, two in pairs)
