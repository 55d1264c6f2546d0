"""Decisions that ``loss_fn`` takes by values of the batch fall while a step is traced, and become its guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from graphpasses._torch import symbols as traced_symbols
from graphpasses._torch.conditions import as_number, rounds_to_digits, with_margin
from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.operator_facts import asking
from graphpasses._torch.operator_floats import OperatorFloats
from graphpasses._torch.schemas import inner_names, is_tensor_subclass
from graphpasses._torch.symbols import bound_symbols, value_at
from graphpasses._torch.traced_floats import as_numpy
from graphpasses._torch.ways_by_size import WaysBySize
from graphpasses.capture.checks import (
    assert_of_sizes,
    assert_truth,
    certain_value,
    checked_truth,
    reads_bool,
    user_asks,
)
from graphpasses.capture.number_indexes import IndexesTraced
from graphpasses.capture.slices import Slices
from graphpasses.capture.traced_lines import line_of, user_line
from graphpasses.errors import CaptureError
from graphpasses.graph import GraphInput, InputKind
from graphpasses.graph.batch import Varying
from graphpasses.graph.guards import NO_DECISION, Decision, Guards, Symbol, run_nodes
from graphpasses.graph.recapture import MAX_STEPS
from graphpasses.identity import named_state
from graphpasses.state.carried import BuiltInError, as_tensor
from graphpasses.state.draws import Draw, draw, draws_undone, torch_draws_undone

aten = torch.ops.aten


class Decisions:
    """The decisions that ``loss_fn`` takes by values of tensors, and by sizes that vary, while it is traced.

    A value may decide that follows from the batch, from buffers and from constants: it can be computed before each
    step. So can some that follow from parameters, and random numbers; others, and what follows from other ranks, are
    refused. ``leaves`` are the batch's, each with its path; ``varying`` are its dims that vary, ``carried`` those of
    the paths at which each call finds something else, and ``draws`` what brings numbers that are drawn. Functions of
    torch take floats where they would build in their values, if the step ``is_compared`` with eager afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[tuple[str, Any]],
        varying: Varying,
        carried: Sequence[str],
        draws: Mapping[str, Draw],
        *,
        is_compared: bool,
    ) -> None:
        self.guards: Guards | None = None
        self._is_compared = is_compared
        self._carried = carried
        self._draws = draws
        self._varying = varying
        self._inputs = [*_state(model), *((GraphInput(InputKind.BATCH, path), leaf) for path, leaf in leaves)]

    @property
    def texts(self) -> list[str]:
        """What was decided, in order, and where."""
        return [] if self.guards is None else [f"{each.condition} {each.where}" for each in self.guards.decisions]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the block, which is traced, and makes its guards; they replace those of an earlier block.

        It must not decide by a value that cannot be computed before a step, nor call what cannot be traced.
        """
        self._slices = Slices(self._inputs)
        self._values: dict[Symbol, Any] = {}
        self._decisions: list[Decision] = []
        self._asserted: set[sympy.Basic] = set()  # of what only running tells
        self._ways = WaysBySize()
        self._floats = OperatorFloats(lambda symbol: self._value_of(self._traced, symbol), self._decided)
        self._by_parameters: dict[Symbol, str] = {}  # what follows from parameters, and where it is asked for
        self._traced: Any = None
        self._refusal = ""
        try:
            told = self._value_of, self._decided, self._excluded, self._ways.is_asked, self._decide_layout
            with traced_symbols.decided_by_values(*told) as traced:
                self._traced = traced
                with self._floats.running(), IndexesTraced(self._is_fixed, self._ways_decided):
                    yield
                self.guards = self._make_guards(traced)
        except traced_symbols.UNDECIDED as error:
            where = self._refusal or f"{line_of(error)}, and that value cannot be computed before the step"
            raise _undecided(where) from error
        except traced_symbols.UNTRACEABLE as error:
            raise CaptureError(
                f"loss_fn calls {error.func} at {line_of(error)}, which cannot be traced: the shape of its result "
                "depends on values, or it has no fake kernel. Use another operator, or compute it outside"
            ) from error
        finally:
            del self._floats  # which know this object

    def _is_fixed(self, number: torch.SymInt) -> bool:
        """Whether a number is the same at each step, or that of a size, by which it is captured."""
        self._slices.follow(self._traced.graph)
        symbols = traced_symbols.expression(number).free_symbols
        unknown = [each for each in symbols if not self._slices.is_size_of_input(each)]
        return all(self._slices.refusal(each) is None for each in unknown) and not self._slices.can_vary(unknown)

    def _value_of(self, traced: Any, symbol: Symbol) -> Any:
        if symbol in self._values:
            return self._values[symbol]
        self._slices.follow(traced.graph)
        if self._slices.is_size_of_input(symbol):
            return None  # torch knows it
        node, _ = self._slices.bound.get(symbol, (None, None))
        if node is not None and (certain := certain_value(node)) is not None:
            self._values[symbol] = certain
            return certain
        reason = self._slices.refusal(symbol)
        if reason is not None and node is not None:
            if reads_bool(node) and (truth := checked_truth()) is not None:
                assert_truth(node, truth, user_line())
                self._values[symbol] = truth
                return truth
            if len(self._by_parameters) < _MAX_BY_PARAMETERS and self._slices.allow(symbol):
                self._by_parameters[symbol] = f"{user_line()}, and that value {reason}"
                reason = None
        if reason is None:
            nodes = self._slices.nodes([symbol])
            written = {node.name for node in self._slices.written(nodes)}
            given = {node: value for node, (_, value) in zip(self._slices.placeholders, self._inputs, strict=True)}
            given |= {node: like for node in nodes if (like := self._slices.stand_in(node)) is not None}
            with outside_tracing(), torch_draws_undone():
                *_, (node, result) = run_nodes(traced.root, traced.graph, nodes, given, written)
                value = value_at(result, bound_symbols(node)[symbol])
            # Sympy has no nan, and one zero.
            if not isinstance(value, float) or (
                math.isfinite(value) and math.copysign(1, value) == (1 if value >= 0 else -1)
            ):
                self._values[symbol] = value
                return value
            reason = f"is {value}"
        self._refusal = f"{user_line()}, and that value {reason}"
        return None

    def _excluded(self, traced: Any, symbol: Symbol, sizes: Sequence[int]) -> bool:
        """Lets the step raise where a size that only running tells is one of these; whether it can."""
        if symbol not in self._slices.bound or user_asks():
            return False
        where = f"{asking(traced)} ({user_line()})"
        return self._ways.is_asked() or all(self._is_other(symbol, size, where) for size in sizes)

    @contextmanager
    def _ways_decided(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Decides by sizes at which eager computes a function otherwise."""
        name = str(getattr(func, "__name__", func))
        for symbol, size, makes_a_difference in self._ways.differing(func, args, kwargs):
            self._decide_size(symbol, size, name, makes_a_difference=makes_a_difference)
        floats = self._floats.taken(func, args, kwargs) if self._is_compared else nullcontext()
        with self._ways.running(), floats:
            yield

    def _decide_layout(self, sizes: Sequence[tuple[Symbol, int]]) -> None:
        """Decides by sizes at which a gradient may be contiguous, or one row; where it is empty it has no bits."""
        for symbol, size in sizes:
            self._decide_size(symbol, size, asking(self._traced), makes_a_difference=size > 0)

    def _decide_size(self, symbol: Symbol, size: int, asks: str, *, makes_a_difference: bool) -> None:
        """Decides whether a size is one at which eager goes another way; of what only running tells it asserts."""
        self._slices.follow(self._traced.graph)
        if symbol in self._values or self._slices.refusal(symbol) is None:
            if makes_a_difference or self._value_of(self._traced, symbol) == size:
                traced_symbols.decide(symbol, size)
        elif makes_a_difference and not self._is_other(symbol, size, where := f"{asks} ({user_line()})"):
            raise _undecided(where)

    def _is_other(self, symbol: Symbol, size: int, where: str) -> bool:
        """Lets the step raise where a number of rows is one with which eager goes another way; whether it can."""
        rows = {0: "no rows", 1: "one row"}.get(size, f"{size} rows")
        message = f"{where} goes another way in eager with {rows}, as were selected: run this batch eagerly"
        return self._assert(sympy.Ne(symbol, size), message)

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
            if not self._assert_unknown(decision):
                raise CaptureError(
                    f"{decision.where} decides by a number that only running tells, as if {decision.condition}, "
                    f"which a captured step cannot assert. {NO_DECISION}"
                )
        stated = {symbol for decision in self._decisions for symbol in decision.condition.free_symbols}
        told = [
            Decision(sympy.Eq(symbol, as_number(value), evaluate=False), "an operator of torch")
            for symbol, value in self._values.items()
            if symbol not in stated
        ]
        self._refuse_carried((*self._decisions, *told))
        self._refuse_numbers((*self._decisions, *told))
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
            if (like := self._slices.stand_in(node)) is not None:
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
        drawn = [str(node.target) for node in nodes if node in self._slices.drawn]
        self._refuse_ways(guards, [*drawn, *(item.fqn for item in guards.inputs if item.fqn in self._draws)])
        return guards

    def _refuse_ways(self, guards: Guards, drawn: Sequence[str]) -> None:
        """Raises where random numbers decide in more ways than there may be captures."""
        if not drawn:
            return

        def others() -> Callable[[GraphInput], Any]:
            numbers = dict(zip(self._draws, map(as_tensor, draw([*self._draws.values()])), strict=True))
            return {item: numbers.get(item.fqn, value) for item, value in self._inputs}.__getitem__

        with outside_tracing(), draws_undone():
            num_ways = guards.num_ways(others, _NUM_DRAWS)
        if num_ways > MAX_STEPS:
            raise _undecided(
                f"{guards.decisions[-1].where}, and that value depends on random numbers ({drawn[-1]}), by "
                f"which a step would be captured in {num_ways} ways or so, and {MAX_STEPS} are kept"
            )

    def _refuse_carried(self, decisions: Iterable[Decision]) -> None:
        """Raises if operators build in fractions that are others at each call, or code decides by what NumPy rounds,
        which it does otherwise than conditions have it.
        """
        names = {node: item.fqn for node, (item, _) in zip(self._slices.placeholders, self._inputs, strict=False)}

        def input_of(symbol: sympy.Symbol) -> str:
            node, _ = self._slices.bound.get(symbol, (None, None))
            source: Any = node.args[0] if node is not None and node.args else None
            return names.get(source, "")

        built_in: dict[str, str] = {}  # and where
        by_numpy: dict[str, str] = {}
        for decision in decisions:
            for symbol in {each for pair in decision.condition.atoms(sympy.Eq) for each in pair.free_symbols}:
                if not symbol.is_integer and (name := input_of(symbol)) in self._carried:
                    built_in.setdefault(name, decision.where)
            if rounds_to_digits(decision.condition):
                read = {input_of(symbol): symbol for symbol in decision.condition.free_symbols}
                by_numpy |= {name: decision.where for name, symbol in read.items() if self._is_of_numpy(symbol)}
        if by_numpy:
            name, where = next(iter(by_numpy.items()))
            text = f"loss_fn decides at {where} by what NumPy rounds {name} to; let Python round float(number)"
            raise BuiltInError(text, by_numpy)
        if built_in:
            name, where = next(iter(built_in.items()))
            raise BuiltInError(
                f"forward changes {name} at each call, and at {where} gives it to a function that builds it in, as "
                "alpha_dropout its rate: the step would be captured again at each call. Set it outside, and seldom, "
                "or compute with it",
                built_in,
            )

    def _is_of_numpy(self, symbol: sympy.Symbol) -> bool:
        node, _ = self._slices.bound.get(symbol, (None, None))
        return node is not None and any(user.target is as_numpy for user in node.users)

    def _refuse_numbers(self, decisions: Iterable[Decision]) -> None:
        """Raises where a number that follows from parameters does more than to be above or below another: each value
        would be a capture of its own.
        """
        for symbol, where in self._by_parameters.items():
            node, _ = self._slices.bound[symbol]
            found = [each.condition for each in decisions if symbol in each.condition.free_symbols]
            is_number = not reads_bool(node) and any(each.has(sympy.Eq, sympy.Ne) for each in found)
            if is_number:
                raise _undecided(where)

    def _assert_unknown(self, decision: Decision) -> bool:
        """Lets the step assert what was taken for true of numbers that only running tells, once all are there.

        Returns whether it does, or nothing of the kind was.
        """
        known = {symbol: as_number(value) for symbol, value in self._values.items()}
        condition = decision.condition.xreplace(known)
        symbols = condition.free_symbols
        if not any(map(self._slices.refusal, symbols)) or not self._slices.is_open(condition):
            return True
        of = "a number of rows that a mask selects, or another that only running tells"
        where = f"{decision.where} goes another way in eager unless {condition}, of {of}"
        return symbols <= self._slices.bound.keys() and self._assert(condition, f"{where}: run this batch eagerly")

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


# Each has two answers: at most eight captures have them all.
_MAX_BY_PARAMETERS = 3
_NUM_DRAWS = 32


def _undecided(where: str) -> CaptureError:
    return CaptureError(
        f"loss_fn decides by a tensor's value (int(tensor), bool(tensor), a comparison) at {where}. A captured step "
        "decides by values of the batch, of buffers and of constants, and thrice by whether what parameters compute "
        f"is above or below something. {NO_DECISION}"
    )


def _state(model: nn.Module) -> Iterator[tuple[GraphInput, torch.Tensor]]:
    """Yields the state of a model as the tracer flattens it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for fqn, tensor in named_state(model):
        kind = InputKind.PARAMETER if fqn in parameters else InputKind.BUFFER
        for attr in inner_names(tensor) if is_tensor_subclass(tensor) else ("",):
            yield GraphInput(kind, fqn, attr), getattr(tensor, attr) if attr else tensor
