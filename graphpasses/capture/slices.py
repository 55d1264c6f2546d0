"""What must run of a traced step, before it, to know a number that decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch import symbols as traced_symbols
from graphpasses._torch.fake_mode import is_fake, outside_tracing
from graphpasses._torch.schemas import draws, named_arguments
from graphpasses._torch.storage import device_of
from graphpasses._torch.symbols import bound_symbols, value_at
from graphpasses.analysis.effects import Effects, operator_effects
from graphpasses.fbgemm.names import SIZED_BY_OFFSETS
from graphpasses.graph import GraphInput, InputKind
from graphpasses.graph.guards import Symbol
from graphpasses.graph.nodes import reach, storages

aten = torch.ops.aten

# Operators of whose results the sizes follow from the values of some arguments, and the shapes of the others.
_SIZED_BY: dict[str, int | slice] = {
    "aten.index.Tensor": 1,
    "aten.masked_select.default": 1,
    "aten.slice.Tensor": slice(1, None),
    **SIZED_BY_OFFSETS,
}
# Operators of whose first argument the shape counts, not the values.
_SHAPED_LIKE = frozenset(
    str(operator.default)
    for operator in (aten.full_like, aten.ones_like, aten.zeros_like, aten.new_full, aten.new_ones, aten.new_zeros)
)


class Slices:
    """What must run of a trace, before a step, to know the value of a symbol."""

    def __init__(self, inputs: Sequence[tuple[GraphInput, Any]]) -> None:
        self.placeholders: list[fx.Node] = []
        self._inputs = inputs
        self.bound: dict[Symbol, tuple[fx.Node, Any]] = {}  # the node that brings a symbol, and its place there
        self.brought: dict[fx.Node, dict[Symbol, Any]] = {}  # the symbols that a node brings, and their places
        self._memory: dict[fx.Node, set[Any]] = {}
        self._writers: dict[Any, list[fx.Node]] = {}
        self._unknown: dict[Any, str] = {}  # by node, or memory, why it cannot be computed
        self._of_parameters: set[str] = set()  # of these, the reasons that it follows from parameters, which it may
        self._allowed: set[Symbol] = set()  # that follow from parameters, and are computed nevertheless
        self._computed: set[fx.Node] = set()  # for these, be there stand-ins or not
        # Calls that cannot be computed, but whose sizes can. Of what is unknown of their arguments the shape counts:
        # any tensor of it stands in.
        self._sized: set[fx.Node] = set()
        # Calls that draw what the next step will, each with the one before it; None behind one that cannot be known.
        self.drawn: dict[fx.Node, fx.Node | None] = {}
        self._draws_are_known = True
        self._stand_ins: dict[fx.Node, torch.Tensor] = {}

    def follow(self, graph: fx.Graph) -> None:
        """Looks at what was traced since the last time."""
        last: Any = next(iter(reversed(graph.nodes)), None)
        for node in graph.nodes:
            if node in self._memory or (node is last and "val" not in node.meta):  # its call runs now
                continue
            effects = operator_effects(node)
            # A constant of the trace has no fake value, and so no memory that shows.
            self._memory[node] = storages(node).union(*(self._memory[other] for other in effects.shares))
            self._memory[node] |= {node} if node.op == "get_attr" else set()
            if node.op == "placeholder":
                self.placeholders.append(node)
            for symbol, path in bound_symbols(node).items():
                self.bind(symbol, node, path)
            reason = self._reason(node, effects)
            if reason is not None:
                self._unknown[node] = reason
                self._look_at_sizes(node)
            for key in (key for other in effects.writes for key in self._memory[other]):
                self._writers.setdefault(key, []).append(node)
                if reason is not None:
                    self._unknown[key] = reason

    def _look_at_sizes(self, node: fx.Node) -> None:
        """Notes of a call that cannot be computed whether its sizes can, with others in place of what is unknown."""
        deciding = _SIZED_BY.get(str(node.target))
        if deciding is None or node not in self.brought:
            return
        known: list[fx.Node] = []
        fx.node.map_arg(node.args[deciding], known.append)
        others = [each for each in node.all_input_nodes if each not in known]
        if not any(map(self._why_unknown, known)) and self._give_stand_ins(others):
            self._sized.add(node)

    def _give_stand_ins(self, nodes: Iterable[fx.Node]) -> bool:
        """Lets others stand in for those of some tensors that are unknown, if their sizes are numbers."""
        shapes = {each: each.meta["val"] for each in nodes if self._why_unknown(each) is not None}
        is_known = all(isinstance(size, int) for value in shapes.values() for size in value.shape)
        if is_known:
            with outside_tracing():
                for each, value in shapes.items():  # of one element, be it as large as an embedding
                    like = torch.zeros((), dtype=value.dtype, device=device_of(value))
                    self._stand_ins[each] = like.expand(value.shape)
        return is_known

    def _why_unknown(self, node: fx.Node) -> str | None:
        return self._worst(self._unknown[key] for key in (node, *self._memory[node]) if key in self._unknown)

    def _worst(self, reasons: Iterable[str]) -> str | None:
        """Returns one of several reasons, of parameters the last; None of none."""
        return min(reasons, key=self._of_parameters.__contains__, default=None)

    def bind(self, symbol: Symbol, node: fx.Node, path: Any) -> None:
        """Notes that a symbol is at a place of a node's value, unless another node brought it."""
        if self.bound.setdefault(symbol, (node, path))[0] is node:
            self.brought.setdefault(node, {})[symbol] = path

    def is_size_of_input(self, symbol: Symbol) -> bool:
        """Whether a symbol is the size of a dim that varies."""
        return symbol in self.bound and self.bound[symbol][0].op == "placeholder"

    def size_of_input(self, symbol: Symbol) -> int:
        """Returns the size that such a symbol has in the batch that is traced."""
        node, path = self.bound[symbol]
        return int(value_at(self._inputs[self.placeholders.index(node)][1], path))

    def _reason(self, node: fx.Node, effects: Effects) -> str | None:
        if node.op == "placeholder":
            item, value = self._inputs[len(self.placeholders) - 1]
            if item.kind is InputKind.PARAMETER:
                reason = f"depends on parameter {item.fqn!r}"
                self._of_parameters |= set() if is_fake(value) else {reason}
                return reason
            return f"depends on {item.fqn}, a fake tensor" if is_fake(value) else None
        reasons = []
        for other in node.all_input_nodes:
            if (why := self._why_unknown(other)) is not None:
                is_of_shapes = str(node.target) in _SHAPED_LIKE and other is node.args[0]
                if not (is_of_shapes and self._give_stand_ins([other])):
                    reasons.append(why)
        if effects.has_hidden_state and not self._draw(node, is_known=not reasons):
            reasons.append(f"depends on random numbers ({node.target})")
        if effects.group is not None:
            reasons.append(f"depends on what other ranks send ({node.target})")
        return self._worst(reasons)

    def _draw(self, node: fx.Node, *, is_known: bool) -> bool:
        """Notes that a call draws, or has another hidden state; whether it can be computed before a step.

        It can if it draws from torch's generator on the CPU, as all calls before it that do.
        """
        found = node.meta.get("val")
        values = [each for each in (found if isinstance(found, tuple) else [found]) if isinstance(each, torch.Tensor)]
        is_drawn = getattr(node.target, "namespace", "") == "aten" and draws(node) and values != []
        if is_drawn and (named_arguments(node).get("generator") or any(device_of(v).type != "cpu" for v in values)):
            return False  # of another generator
        self._draws_are_known &= is_drawn and is_known
        if self._draws_are_known:
            self.drawn[node] = next(reversed(self.drawn), None)
        return self._draws_are_known

    def refusal(self, symbol: Symbol) -> str | None:
        """Returns why the value of a symbol cannot be computed before a step; None if it can."""
        if symbol not in self.bound:
            return "cannot be computed before the step"
        node, is_known = self.bound[symbol][0], self.is_size_of_input(symbol) or symbol in self._allowed
        return None if is_known or node in self._sized else self._unknown.get(node)

    def allow(self, symbol: Symbol) -> bool:
        """Lets a value of a tensor that follows from parameters be computed before a step; whether it can."""
        node, _ = self.bound[symbol]
        if node.target is not aten._local_scalar_dense.default or self._unknown.get(node) not in self._of_parameters:
            return False
        self._allowed.add(symbol)

        def sources(each: fx.Node) -> list[fx.Node]:
            is_computed = each not in self._stand_ins or self._why_unknown(each) in self._of_parameters
            return self._sources(each) if is_computed else []

        self._computed |= {each for each in reach([node], sources) if self._why_unknown(each) in self._of_parameters}
        return True

    def stand_in(self, node: fx.Node) -> torch.Tensor | None:
        """Returns what is read in the place of a node, whose shape counts alone; None of one that is computed."""
        return None if node in self._computed else self._stand_ins.get(node)

    def can_vary(self, symbols: Iterable[Symbol]) -> bool:
        """Whether the values of symbols can be computed before a step, and may differ from step to step."""
        symbols = list(symbols)
        return all(self.refusal(symbol) is None for symbol in symbols) and any(
            node.op == "placeholder" or node in self.drawn or (node.op == "get_attr" and not is_literal(node))
            for node in self.nodes(symbols)
        )

    def is_open(self, condition: sympy.Basic) -> bool:
        """Whether a condition may be false: it is not that a size is no less than zero.

        What no node brings is the size of a fake result that torch made to ask for its kind alone.
        """
        sizes = {
            symbol: sympy.Dummy(integer=True, nonnegative=True)
            for symbol in condition.free_symbols
            if symbol not in self.bound or traced_symbols.is_size(self.bound[symbol][1])
        }
        return condition.xreplace(sizes) is not sympy.true

    def nodes(self, symbols: Iterable[Symbol]) -> list[fx.Node]:
        """Returns the nodes that the values of symbols follow from, in order."""

        def sources(node: fx.Node) -> list[fx.Node]:
            return self._sources(node) if self.stand_in(node) is None else []

        return sorted(reach([self.bound[symbol][0] for symbol in symbols], sources))

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        readers = [*node.all_input_nodes, *([] if node in self._sized else [node])]
        memory = {key for other in readers if self.stand_in(other) is None for key in self._memory[other]}
        writers = (writer for key in memory for writer in self._writers.get(key, ()))
        before = self.drawn.get(node)
        return [
            *node.all_input_nodes,
            *(writer for writer in writers if writer < node),
            *([before] if before else []),
        ]

    def written(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the placeholders and constants that nodes write in place."""
        memory = {key for node in nodes for other in operator_effects(node).writes for key in self._memory[other]}
        return [node for node in nodes if node.op in ("placeholder", "get_attr") and self._memory[node] & memory]


def is_literal(node: fx.Node) -> bool:
    """Whether a constant is one that ``loss_fn`` makes at each call, as ``torch.tensor(2)`` does."""
    return all(user.target is aten.lift_fresh_copy.default for user in node.users)
