"""What a captured step was traced with: a batch for which it is otherwise takes another path through ``loss_fn``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from graphpasses._torch.conditions import as_function, as_number
from graphpasses._torch.symbols import value_at
from graphpasses.graph.train_graph import GraphInput
from graphpasses.state.draws import torch_draws_undone

Symbol: TypeAlias = sympy.Symbol

NO_DECISION = (
    "What only cuts, splits, counts or is returned is no decision: write x.item() for int(x) and float(x), "
    "x[:n.item()] for x[:n], x.shape[0] for len(x), bincount(x, minlength=n)[:n] for bincount(x, minlength=n), and "
    "leave out a test that spares work where there are no rows. Nor is a check that raises: write "
    "`if not torch.isfinite(x): raise ...` for math.isfinite(x.item()). Else compute with torch, as x.exp() for "
    "np.exp(x.item()), or torch.where; or return x, and decide after the step"
)
"""What to write instead of a decision."""
BY_PARAMETERS = (
    "loss_fn decides by what parameters compute: each call computes that first, by {} operators, and then runs the "
    "step; torch.where, or a decision behind the step, spares it"
)
"""What a step says that does."""


@dataclass(frozen=True)
class Decision:
    """One decision of ``loss_fn`` by values of tensors."""

    condition: sympy.Basic  # what is true of the values while the decision falls as it was captured
    where: str  # the line of the user's code


@dataclass(frozen=True, eq=False)
class Guards:
    """What must be true of a batch, and of buffers, for a captured step to take the path that eager takes."""

    module: fx.GraphModule  # computes the values that were decided by; its nodes are in the order of the step
    inputs: tuple[GraphInput, ...]  # what its placeholders carry
    written: frozenset[str]  # the names of the nodes that it writes in place, and that are not its own
    # By name of a node, the symbols that it brings, each with its place in the node's value.
    places: Mapping[str, tuple[tuple[Symbol, Any], ...]]
    decisions: tuple[Decision, ...]  # in the order in which they fell
    captured: Mapping[Symbol, Any]  # the values that the step was captured with
    sizes: frozenset[Symbol] = frozenset()  # those of the symbols that are sizes of the batch

    @property
    def num_operators(self) -> int:
        """How many operators compute the values that were decided by."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)

    def difference(self, value_of: Callable[[GraphInput], Any]) -> str | None:
        """Says which decision is the first that falls otherwise for what inputs carry now; None if there is none."""
        if (changed := self.first_changed(value_of)) is None:
            return None
        decision, before, now = changed
        what = "sizes" if self.sizes.issuperset(decision.condition.free_symbols) else "a tensor's value"
        return (
            f"loss_fn decided by {what} at {decision.where}: it was {before} when the step was captured, and is "
            f"{now} for this batch"
        )

    def first_changed(self, value_of: Callable[[GraphInput], Any]) -> tuple[Decision, str, str] | None:
        """Returns the first decision that falls otherwise, with the values then and now; None if there is none."""
        with torch_draws_undone():
            for decision, values, holds in self._decided(value_of):
                if not holds:
                    symbols = sorted(decision.condition.free_symbols, key=str)
                    before, now = (", ".join(str(v[s]) for s in symbols) for v in (self.captured, values))
                    return decision, before, now
        return None

    def num_ways(self, drawn: Callable[[], Callable[[GraphInput], Any]], num_draws: int) -> int:
        """Says in about how many ways decisions fall by the random numbers that several steps would draw.

        Of those that are inputs, ``drawn`` draws others, and returns what tells the values of all.
        """
        ways: dict[Decision, set[object]] = {decision: {True} for decision in self.decisions}
        with torch_draws_undone():
            for _ in range(num_draws):
                for decision, values, holds in self._decided(drawn()):
                    numbers = {symbol: as_number(value) for symbol, value in values.items()}
                    is_number = isinstance(decision.condition, (sympy.Eq, sympy.Ne))
                    ways[decision].add(holds or (is_number and decision.condition.lhs.xreplace(numbers)))
                    if not holds:
                        break
        return math.prod(map(len, ways.values()))

    def _decided(self, value_of: Callable[[GraphInput], Any]) -> Iterator[tuple[Decision, dict[Symbol, Any], bool]]:
        """Yields each decision, with the values that are known then, and whether it falls as it was captured."""
        values: dict[Symbol, Any] = {}
        pending = self._checks[::-1]
        graph = self.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        given = dict(zip(placeholders, map(value_of, self.inputs), strict=True))
        for node, value in run_nodes(self.module, graph, graph.nodes, given, self.written):
            # Checked at once: if a decision falls otherwise, what was traced after it means nothing.
            for symbol, path in self.places.get(node.name, ()):
                values[symbol] = value_at(value, path)
            while pending and pending[-1][1] <= values.keys():
                decision, _, holds = pending.pop()
                yield decision, values, holds(values)

    @cached_property
    def _checks(self) -> list[tuple[Decision, set[Symbol], Callable[[Mapping[Symbol, Any]], bool]]]:
        return [(each, each.condition.free_symbols, self._holds(each.condition)) for each in self.decisions]

    def _holds(self, condition: sympy.Basic) -> Callable[[Mapping[Symbol, Any]], bool]:
        symbols, is_true = tuple(condition.free_symbols), as_function(condition)
        return lambda values: all(values[symbol] == self.captured[symbol] for symbol in symbols) or is_true(values)


def run_nodes(
    module: nn.Module,
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    given: Mapping[fx.Node, Any],
    written: Collection[str],
) -> Iterator[tuple[fx.Node, Any]]:
    """Runs nodes of a graph, each after what it reads, and yields each with its value; of the ``written`` a copy.

    They run as those of a step do: without autograd, and with no other casts than theirs.
    """
    interpreter = fx.Interpreter(module, garbage_collect_values=False, graph=graph)
    kinds = {"cpu", *(each.device.type for each in given.values() if isinstance(each, torch.Tensor))}
    with torch.no_grad(), ExitStack() as uncast:
        for kind in filter(torch.amp.is_autocast_available, kinds):
            uncast.enter_context(torch.autocast(kind, enabled=False))
        for node in nodes:
            if node.op != "output":
                value = given[node] if node in given else interpreter.run_node(node)
                interpreter.env[node] = value.clone() if node.name in written else value
                yield node, interpreter.env[node]
