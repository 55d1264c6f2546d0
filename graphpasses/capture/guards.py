"""Decisions that ``loss_fn`` takes by values of the batch fall while a step is traced, and become its guards."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from graphpasses._torch import symbols as traced_symbols
from graphpasses._torch.conditions import as_number, with_margin
from graphpasses._torch.fake_mode import is_fake, outside_tracing
from graphpasses._torch.operator_facts import asking
from graphpasses._torch.schemas import inner_names, is_tensor_subclass
from graphpasses._torch.symbols import bound_symbols, value_at
from graphpasses.analysis.effects import Effects, operator_effects
from graphpasses.capture.checks import (
    assert_of_sizes,
    assert_truth,
    checked_truth,
    reads_bool,
    spares_work,
    user_asks,
)
from graphpasses.capture.traced_lines import line_of, user_line
from graphpasses.errors import CaptureError
from graphpasses.fbgemm.names import SIZED_BY_OFFSETS
from graphpasses.graph import GraphInput, InputKind
from graphpasses.graph.batch import Varying
from graphpasses.graph.guards import NO_DECISION, Decision, Guards, Symbol, run_nodes
from graphpasses.graph.nodes import reach, storages

aten = torch.ops.aten


class Decisions:
    """The decisions that ``loss_fn`` takes by values of tensors, and by sizes that vary, while it is traced.

    A value may decide that follows from the batch, from buffers and from constants: it can be computed before each
    step. One that follows from parameters, random numbers or other ranks is refused. ``leaves`` are the batch's, each
    with its path; ``varying`` are its dims that vary.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[tuple[str, Any]], varying: Varying) -> None:
        self.guards: Guards | None = None
        self._varying = varying
        self._inputs = [*_state(model), *((GraphInput(InputKind.BATCH, path), leaf) for path, leaf in leaves)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the block, which is traced, and makes its guards; they replace those of an earlier block.

        It must not decide by a value that cannot be computed before a step, nor call what cannot be traced.
        """
        self._slices = _Slices(self._inputs)
        self._values: dict[Symbol, Any] = {}
        self._decisions: list[Decision] = []
        self._asserted: set[sympy.Basic] = set()  # of what only running tells
        self._traced: Any = None
        self._refusal = ""
        try:
            with traced_symbols.decided_by_values(self._value_of, self._decided, self._excluded) as traced:
                self._traced = traced
                yield
                self.guards = self._make_guards(traced)
        except traced_symbols.UNDECIDED as error:
            where = self._refusal or f"{user_line()}, and that value cannot be computed before the step"
            raise CaptureError(
                f"loss_fn decides by a tensor's value (int(tensor), bool(tensor), a comparison) at {where}. A "
                f"captured step decides by values of the batch, of buffers and of constants alone. {NO_DECISION}"
            ) from error
        except traced_symbols.UNTRACEABLE as error:
            raise CaptureError(
                f"loss_fn calls {error.func} at {line_of(error)}, which cannot be traced: the shape of its result "
                "depends on values, or it has no fake kernel. Use another operator, or compute it outside"
            ) from error

    def _value_of(self, traced: Any, symbol: Symbol) -> Any:
        if symbol in self._values:
            return self._values[symbol]
        self._slices.follow(traced.graph)
        if self._slices.is_size_of_input(symbol):
            return None  # torch knows it
        node, _ = self._slices.bound.get(symbol, (None, None))
        if node is not None and (certain := certain_value(node)) is not None:
            return certain
        if (reason := self._slices.refusal(symbol)) is None:
            nodes = self._slices.nodes([symbol])
            written = {node.name for node in self._slices.written(nodes)}
            given = {node: value for node, (_, value) in zip(self._slices.placeholders, self._inputs, strict=True)}
            given |= {node: self._slices.stand_ins[node] for node in nodes if node in self._slices.stand_ins}
            with outside_tracing(), torch.no_grad():
                *_, (node, result) = run_nodes(traced.root, traced.graph, nodes, given, written)
                value = value_at(result, bound_symbols(node)[symbol])
            # Sympy has no nan, and one zero.
            if not isinstance(value, float) or (
                math.isfinite(value) and math.copysign(1, value) == (1 if value >= 0 else -1)
            ):
                self._values[symbol] = value
                return value
            reason = f"is {value}"
        elif node is not None and reads_bool(node) and (truth := checked_truth()) is not None:
            assert_truth(node, truth, user_line())
            self._values[symbol] = truth
            return truth
        self._refusal = f"{user_line()}, and that value {reason}"
        return None

    def _excluded(self, traced: Any, symbol: Symbol, sizes: Sequence[int]) -> bool:
        """Lets the step raise where a size that only running tells is one of these; whether it can."""
        if symbol not in self._slices.bound or user_asks():
            return False
        for size in sizes:
            if size == 1 or not spares_work():
                asks, rows = f"{asking(traced)} ({user_line()})", "one row" if size else "no rows"
                message = f"{asks} goes another way in eager with {rows}, as were selected: run this batch eagerly"
                if not self._assert(sympy.Ne(symbol, size), message):
                    return False
        return True

    def _assert(self, condition: sympy.Basic, message: str) -> bool:
        """Lets the step assert a condition, once; whether it can."""
        if condition not in self._asserted and assert_of_sizes(condition, self._slices.bound, message):
            self._asserted.add(condition)
        return condition in self._asserted

    def _decided(self, condition: sympy.Basic) -> None:
        self._decisions.append(Decision(with_margin(condition), user_line()))
        if self._traced is not None:
            self._slices.follow(self._traced.graph)
            self._assert_unknown(self._decisions[-1])

    def _make_guards(self, traced: Any) -> Guards | None:
        self._slices.follow(traced.graph)
        for decision in self._decisions:
            self._assert_unknown(decision)
        stated = {symbol for decision in self._decisions for symbol in decision.condition.free_symbols}
        told = [
            Decision(sympy.Eq(symbol, as_number(value), evaluate=False), "an operator of torch")
            for symbol, value in self._values.items()
            if symbol not in stated
        ]
        by_condition = {decision.condition: decision for decision in reversed((*self._decisions, *told))}
        decisions = [
            decision
            for decision in (*reversed(by_condition.values()), *self._size_decisions())
            if self._slices.is_open(decision.condition) and self._slices.can_vary(decision.condition.free_symbols)
        ]
        # Sizes first: with others, what computes the values may fail.
        decisions.sort(key=lambda each: not all(map(self._slices.is_size_of_input, each.condition.free_symbols)))
        if not decisions:
            return None
        symbols = {symbol for decision in decisions for symbol in decision.condition.free_symbols}
        nodes = self._slices.nodes(symbols)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if (like := self._slices.stand_ins.get(node)) is not None:
                options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
                copies[node] = graph.call_function(aten.zeros.default, ([*like.shape],), options)
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(())
        item_of = dict(zip(self._slices.placeholders, self._inputs, strict=True))
        brought = {node: self._slices.brought[node].items() for node in nodes if node in self._slices.brought}
        sizes = frozenset(filter(self._slices.is_size_of_input, symbols))
        guards = Guards(
            module=fx.GraphModule(traced.root, graph),
            inputs=tuple(item_of[node][0] for node in nodes if copies[node].op == "placeholder"),
            written=frozenset(copies[node].name for node in self._slices.written(nodes)),
            places={
                copies[node].name: tuple((symbol, path) for symbol, path in places if symbol in symbols)
                for node, places in brought.items()
            },
            decisions=tuple(decisions),
            captured={s: self._slices.size_of_input(s) for s in sizes}
            | {s: self._value_of(traced, s) for s in symbols - sizes},
            sizes=sizes,
        )
        values = dict(self._inputs)
        with outside_tracing():
            changed = guards.first_changed(values.__getitem__)
        if changed is not None:
            decision, before, now = changed
            raise CaptureError(
                f"loss_fn decides by a tensor's value at {decision.where}, and changes that value itself: it was "
                f"{before}, "
                f"and is {now} after it ran. A captured step reads and writes such a tensor as eager does only where "
                "it is a buffer of the model: make it one (register_buffer), or update it after the step"
            )
        return guards

    def _assert_unknown(self, decision: Decision) -> None:
        """Lets the step assert what was taken for true of numbers that only running tells, once all are there."""
        condition, symbols = decision.condition, decision.condition.free_symbols
        is_there = symbols <= self._slices.bound.keys() and any(map(self._slices.refusal, symbols))
        if is_there and self._slices.is_open(condition):
            of = "a number of rows that a mask selects, or another that only running tells"
            where = f"{decision.where} goes another way in eager unless {condition}, of {of}"
            self._assert(condition, f"{where}: run this batch eagerly")

    def _size_decisions(self) -> list[Decision]:
        """Returns what a trace takes for granted of sizes that may vary, and torch makes no guard of."""
        found = []
        for node, (item, _) in zip(self._slices.placeholders, self._inputs, strict=False):
            for dim in self._varying.get(item.fqn, {}) if item.kind is InputKind.BATCH else ():
                size = node.meta["val"].shape[dim]
                if isinstance(size, torch.SymInt):
                    condition = traced_symbols.size_condition(size)
                else:  # sizes 0 and 1 are constants of a trace
                    symbol = sympy.Dummy(integer=True, nonnegative=True)
                    self._slices.bind(symbol, node, traced_symbols.size_path(dim))
                    condition = sympy.Eq(symbol, size)
                found.append(Decision(condition, f"dim {dim} of {item.fqn}"))
        return found


def _state(model: nn.Module) -> Iterator[tuple[GraphInput, torch.Tensor]]:
    """Yields the state of a model as the tracer flattens it."""
    for kind, named in (
        (InputKind.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (InputKind.BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for fqn, tensor in named:
            if is_tensor_subclass(tensor):
                for attr in inner_names(tensor):
                    yield GraphInput(kind, fqn, attr), getattr(tensor, attr)
            else:
                yield GraphInput(kind, fqn), tensor


# Operators of whose results the sizes follow from the values of one argument, and the shapes of the others.
_SIZED_BY = {
    "aten.index.Tensor": 1,
    "aten.masked_select.default": 1,
    **SIZED_BY_OFFSETS,
}


class _Slices:
    """What must run of a trace, before a step, to know the value of a symbol."""

    def __init__(self, inputs: Sequence[tuple[GraphInput, Any]]) -> None:
        self.placeholders: list[fx.Node] = []
        self._inputs = inputs
        self.bound: dict[Symbol, tuple[fx.Node, Any]] = {}  # the node that brings a symbol, and its place there
        self.brought: dict[fx.Node, dict[Symbol, Any]] = {}  # the symbols that a node brings, and their places
        self._memory: dict[fx.Node, set[Any]] = {}
        self._writers: dict[Any, list[fx.Node]] = {}
        self._unknown: dict[Any, str] = {}  # by node, or memory, why it cannot be computed
        # Calls that cannot be computed, but whose sizes can. Of what is unknown of their arguments the shape counts:
        # any tensor of it stands in.
        self._sized: set[fx.Node] = set()
        self.stand_ins: dict[fx.Node, torch.Tensor] = {}

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
        shapes = {each: each.meta["val"] for each in others if self._why_unknown(each) is not None}
        if any(map(self._why_unknown, known)) or not all(
            isinstance(size, int) for value in shapes.values() for size in value.shape
        ):
            return
        self._sized.add(node)
        with outside_tracing():
            for each, value in shapes.items():  # of one element, be it as large as an embedding
                self.stand_ins[each] = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)

    def _why_unknown(self, node: fx.Node) -> str | None:
        return next((self._unknown[key] for key in (node, *self._memory[node]) if key in self._unknown), None)

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
                return f"depends on parameter {item.fqn!r}"
            return f"depends on {item.fqn}, a fake tensor" if is_fake(value) else None
        for other in node.all_input_nodes:
            if (reason := self._why_unknown(other)) is not None:
                return reason
        if effects.has_hidden_state:
            return f"depends on random numbers ({node.target})"
        return None if effects.group is None else f"depends on what other ranks send ({node.target})"

    def refusal(self, symbol: Symbol) -> str | None:
        """Returns why the value of a symbol cannot be computed before a step; None if it can."""
        if symbol not in self.bound:
            return "cannot be computed before the step"
        node = self.bound[symbol][0]
        return None if self.is_size_of_input(symbol) or node in self._sized else self._unknown.get(node)

    def can_vary(self, symbols: Iterable[Symbol]) -> bool:
        """Whether the values of symbols can be computed before a step, and may differ from step to step."""
        symbols = list(symbols)
        return all(self.refusal(symbol) is None for symbol in symbols) and any(
            node.op == "placeholder" or (node.op == "get_attr" and not is_literal(node))
            for node in self.nodes(symbols)
        )

    def is_open(self, condition: sympy.Basic) -> bool:
        """Whether a condition may be false: it is not that a size is no less than zero."""
        sizes = {
            symbol: sympy.Dummy(integer=True, nonnegative=True)
            for symbol in condition.free_symbols
            if symbol in self.bound and traced_symbols.is_size(self.bound[symbol][1])
        }
        return condition.xreplace(sizes) is not sympy.true

    def nodes(self, symbols: Iterable[Symbol]) -> list[fx.Node]:
        """Returns the nodes that the values of symbols follow from, in order."""

        def sources(node: fx.Node) -> list[fx.Node]:
            if node in self.stand_ins:
                return []
            readers = [*node.all_input_nodes, *([] if node in self._sized else [node])]
            memory = {key for other in readers if other not in self.stand_ins for key in self._memory[other]}
            writers = (writer for key in memory for writer in self._writers.get(key, ()))
            return [*node.all_input_nodes, *(writer for writer in writers if writer < node)]

        return sorted(reach([self.bound[symbol][0] for symbol in symbols], sources))

    def written(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the placeholders and constants that nodes write in place."""
        memory = {key for node in nodes for other in operator_effects(node).writes for key in self._memory[other]}
        return [node for node in nodes if node.op in ("placeholder", "get_attr") and self._memory[node] & memory]


def is_literal(node: fx.Node) -> bool:
    """Whether a constant is one that ``loss_fn`` makes at each call, as ``torch.tensor(2)`` does."""
    return all(user.target is aten.lift_fresh_copy.default for user in node.users)


_COMPARISONS = {getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}


def certain_value(node: fx.Node) -> bool | None:
    """Returns what a node that reads a number from a tensor computes, if it is a bool that nothing changes, or None.

    Layers that are dropped at random ask ``torch.rand([]) < self.layerdrop``, also where none is ever dropped: no
    draw changes the answer.
    """
    compared = node.args[0]
    if not isinstance(compared, fx.Node) or compared.target not in _COMPARISONS:
        return None
    drawn, bound = compared.args
    if not isinstance(drawn, fx.Node) or drawn.target is not aten.rand.default:
        return None
    if not isinstance(bound, (int, float)):
        return None
    # Between 0 and 1, which low precision may round to, a comparison changes once at most.
    compare = _COMPARISONS[compared.target]
    return bool(compare(0, bound)) if compare(0, bound) == compare(1, bound) else None
