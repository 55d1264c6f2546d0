"""What the calls of operators make: of rules where there are some, and what they write."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from graphpasses._torch import pytree
from graphpasses._torch.fake_calls import fake_call
from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.schemas import (
    FunctionalizedCall,
    WrittenView,
    bind_named,
    given_arguments,
    is_seeded,
    says_where,
    schemas,
)
from graphpasses.analysis.effects import names_written, nodes_in
from graphpasses.fbgemm.names import BOUNDS_CHECK, TRACED_LOOKUP, WARNS
from graphpasses.graph import argument
from graphpasses.graph.nodes import freeze
from graphpasses.proof import movement
from graphpasses.proof.core.facts import Facts, Leaf, leaves
from graphpasses.proof.core.memory import Memory
from graphpasses.proof.core.operators import RULES, out_of_place
from graphpasses.proof.core.values import Argument, Result, Value
from graphpasses.proof.core.views import View
from graphpasses.proof.evaluated import Check
from graphpasses.proof.rows import AXIOM as ROWS
from graphpasses.proof.rows import ROW_BY_ROW, Made, RowValues, by_row, row_shape
from graphpasses.proof.sizes import Sizes
from graphpasses.proof.spelling import Call, are_computed_apart, evaluated, plain_call

aten = torch.ops.aten

LOSS, GRADIENT, VALUE = "the loss", "the gradient of ", "output "
"""What people call the loss, and the beginnings of what they call a gradient, and another value."""


class Calls(Memory):
    """Evaluates calls of operators that do not communicate."""

    _table: RowValues

    def __init__(self, values: RowValues, facts: Facts, sizes: Sizes) -> None:
        super().__init__(values, facts)
        self._sizes = sizes
        self._axioms: set[str] = set()  # the names of those that were used
        self._random = values.source(("random state",))
        self._hidden = values.source(("hidden state",))
        self._inputs: dict[fx.Node, str] = {}
        self._layers: dict[int, tuple[Value, ...]] = {}  # by the number of a tensor, those behind each other in it

    def _roots(self, node: fx.Node) -> set[Leaf]:
        return {place.root for place in self._facts.places[node] if place is not None}

    def opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        """Returns a value into which no rule looks, known by one of its rows where only their number varies."""
        read_as = {each.dtype for each in key if isinstance(each, View)}  # type: ignore[attr-defined]
        is_of_bytes = key[:2] == ("call", str(aten.view.dtype)) or not read_as <= {torch.bool}  # type: ignore[index]
        if isinstance(fake, torch.Tensor) and fake.dtype == torch.bool and is_of_bytes:
            key = ("call", "view.dtype(bool)", object())  # copies make 1 of other bytes than 0, or leave them
        is_sure = isinstance(fake, torch.Tensor) and node not in self._facts.guessed
        view = View.of(fake) if is_sure and type(fake.shape[0] if fake.dim() else 0) is not int else None
        shape = None if view is None else row_shape(view)
        if view is None or shape is None:
            return super().opaque(node, fake, key, part)
        value = self._table.of_rows(("result", key, part, fake.dtype), fake.dtype, view.shape[0], shape)
        self._made.setdefault(value.source, node)  # type: ignore[arg-type]
        return value

    def _call(self, target: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
        """Returns what an operator's results depend on: its arguments' values, and how they lie in memory."""
        plain = self._plain(target, args, kwargs)
        is_copy = RULES.get(target, ("",))[0] in ("joins", "features")  # wherever the elements lie that it copies
        given, named = evaluated(plain, self._number if is_copy else lambda node: self._argument(node, target))
        if str(target) == BOUNDS_CHECK:  # it does not read the count of bad ids
            given[_place_of("warning", target)] = None
        key = self._key(target, given, named)
        return self._in_memory(key, target, args[0]) if args and isinstance(args[0], fx.Node) else key

    def _in_memory(self, key: tuple[Hashable, ...], target: Any, operand: fx.Node, *, is_copy: bool = False) -> Any:
        """Returns what a call depends on that may read beside its operand, in the memory of that, or of a copy."""
        if not says_where(target):
            return key
        memory: list[Hashable] = []
        for root, view in filter(None, self._facts.places[operand]):
            held, outside = self._held.get(root), "" if is_copy else self._facts.outside(root)
            memory.append((self._now(root).number, self._view_of(root), view, held and held.beyond, outside))
        return "in memory", key, tuple(memory)

    def _plain(self, target: Any, args: Any, kwargs: Any) -> Call:
        """Returns the arguments of a call as all that mean the same have them."""
        first = self._facts.places[args[0]] if args and isinstance(args[0], fx.Node) else []
        is_known = len(first) == 1 and first[0] is not None and first[0].view.is_known
        return plain_call(target, args, kwargs, first[0].view.shape if is_known else None)  # type: ignore[union-attr]

    def _arguments(self, node: fx.Node) -> Call:
        """Returns the arguments of a node as all that mean the same have them."""
        return self._plain(node.target, node.args, node.kwargs)

    def _after_others(self, is_drawn: bool, has_hidden_state: bool, key: Hashable) -> Hashable:
        """Returns what a call depends on that may draw random numbers, or have a state of its own."""
        if is_drawn:
            key = ("drawn", key, self._random)
            self._random = self._table.source(("random state after", key))
        if has_hidden_state:
            key = ("hidden", key, self._hidden)
            self._hidden = self._table.source(("hidden state after", key))
        return key

    def moved_value(self, node: fx.Node, target: Any) -> Result:
        """Returns what a rule says of a call of an operator, or of the one that does the same out of place."""
        if target not in RULES:
            return None
        name, rule = RULES[target]
        found: Result = None
        if target in movement.IDENTITIES:
            found = self._read(argument(node))
        elif target == aten.copy.default and (copied := self._copied(node)) is not None:
            found = copied
        elif self._has_known_sizes(node):
            args, kwargs = self._read_all(target, node)
            if target == aten.constant_pad_nd.default:
                kwargs["origin"] = origin_of_padding(node, self._inputs)
            # Else the call would fail.
            is_given = isinstance(next(iter(args), None), Value) or not takes_tensor(target)
            has_fraction = any(isinstance(self._facts[each], torch.SymFloat) for each in node.all_input_nodes)
            if is_given and not has_fraction and all(map(_is_known, (*args, *kwargs.values()))):
                found = rule(self._table, self._made_by(node), *args, **kwargs)
        elif target in ROW_BY_ROW and (node not in self._facts.guessed or self._says_row_shape(node)):
            found = self._by_row(node, target)
        if found is None:
            found = self._layered(node, target)
        if found is not None:
            self._axioms.add(name)
        return found

    def _has_known_sizes(self, node: fx.Node) -> bool:
        is_guess = self._facts.varies and node in self._facts.guessed  # a number may be one of many sizes
        return not is_guess and all(place is not None and place.view.is_known for place in self._facts.places[node])

    def _made_by(self, node: fx.Node) -> Made | list[Made]:
        """Returns what rules are told of a node's results, whose sizes are known."""
        fakes, views = self._facts[node], [place.view for place in self._facts.places[node] if place is not None]
        tensors = zip(views, leaves(fakes), strict=True)
        made = [Made(view.shape, view.dtype, fake.device) for view, (fake, _) in tensors]
        return made if isinstance(fakes, (list, tuple)) else made[0]

    def _by_row(self, node: fx.Node, target: Any) -> Result:
        """Returns what a rule says of each row."""
        key = self._call(node.target, node.args, node.kwargs)
        args, kwargs = self._read_all(target, node)
        found = by_row(self._table, target, key, self._facts[node], args, kwargs, self._sizes.row_count)
        if found is not None:
            self._axioms.add(ROWS)
        return found

    def _layered(self, node: fx.Node, target: Any) -> Result:
        """Returns a tensor as those that lie behind each other along its first dim, or one of these, of any sizes."""
        if target not in (aten.stack.default, aten.unsqueeze.default, aten.expand.default, aten.select.int):
            return None
        (of, *args), kwargs = self._read_all(target, node)
        layers = self._layers.get(of.number) if isinstance(of, Value) else None
        if target == aten.select.int:
            return layers[args[1]] if layers and args[0] == 0 and args[1] in range(len(layers)) else None
        if target == aten.stack.default:
            layers = tuple(of) if args in ([], [0]) else None
        elif target == aten.unsqueeze.default:
            layers = (of,) if args == [0] else None
        elif layers is not None:  # other sizes may not be expanded
            places = [self._facts.places[each][0] for each in (argument(node), node)]
            one, two = (place and place.view.shape[1:] for place in places)
            layers = layers * args[0][0] if len(layers) == 1 and type(args[0][0]) is int and one == two else None
        if kwargs or not layers or any(not isinstance(each, Value) or each.shape is not None for each in layers):
            return None
        value = self._table.other(("layers", tuple(each.number for each in layers)), layers[0].dtype)
        self._layers[value.number] = layers
        return value

    def _says_row_shape(self, node: fx.Node) -> bool:
        """Whether a view's arguments say of all its sizes but the first what its fake value says."""
        (place,) = self._facts.places[node][:1] or [None]
        sizes: Any = node.args[1] if node.target == aten.view.default and len(node.args) > 1 else None
        if place is None or not sizes or (self._facts.varies and type(sizes[0]) is int and sizes[0] != -1):
            return False  # with another number of rows it fails
        return tuple(sizes[1:]) == row_shape(place.view)

    def _read_all(self, target: Any, node: fx.Node) -> Call:
        """Returns the arguments of a call, with values in the places of nodes."""
        return evaluated(self._plain(target, node.args, node.kwargs), self._read)  # type: ignore[no-any-return]

    def _copied(self, node: fx.Node) -> Value | None:
        """Returns a tensor whose sizes depend on data, where all of it is copied into another."""
        to, of, *_ = self._arguments(node)[0]
        target, given, source = self._facts[to], self._facts[of], self._read(of)
        if not isinstance(source, Value) or source.pieces is not None or given.dtype != target.dtype:
            return None
        return source if statically_known_true(sym_eq(given.shape, target.shape)) else None

    def _written(self, node: fx.Node, writes: tuple[fx.Node, ...], key: Hashable, result: Result) -> Result:
        """Evaluates an operator that writes arguments."""
        given = self._arguments(node)[0]
        first = next(iter(given), None)
        is_first = len(writes) == 1 and writes[0] is first
        if is_first and self._roots(node) == self._roots(writes[0]) and isinstance(result, Value):
            call: Any = key
            while call[0] in ("drawn", "hidden"):
                call = call[1]
            if "overlapping" not in call:
                moved = self.moved_value(node, out_of_place(node.target))
                result = result if moved is None else moved
            self._write(writes[0], result, node)
            return result
        for index, each in enumerate(writes):
            written = self.opaque(each, self._facts[each], ("written", index, key))
            if str(node.target) == BOUNDS_CHECK and each is given[_place_of("warning", node.target)]:
                written = self._counted(each, given[_place_of("bounds_check_mode", node.target)], written)
            self._write(each, written, node)
        return result

    def _each(self, node: fx.Node) -> list[Any]:
        """Evaluates an operator on lists of tensors: on each element as if that were alone."""
        self._axioms.add("lists")
        results: list[Any] = []
        written, fakes = names_written(node), self._facts[node]
        args, kwargs = evaluated(self._arguments(node), lambda each: self._argument(each, node.target))
        targets = {
            argument.name: [
                (each, fake, place)
                for each in nodes_in(value)
                for (fake, _), place in zip(leaves(self._facts[each]), self._facts.places[each], strict=True)
                if place is not None
            ]
            for argument, value in given_arguments(node)
            if argument.name in written
        }
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        length = max(map(len, lists))
        apart = ("one by one",) if are_computed_apart(self._table, node.target, lists) else ()
        for index in range(length):

            def element(value: Any, index: int = index) -> Any:
                return value[index] if isinstance(value, (list, tuple)) and value else value

            key = self._key(
                node.target, [*map(element, args)], {name: element(value) for name, value in kwargs.items()}
            )
            key = (*key, *apart)
            if isinstance(fakes, (list, tuple)):
                results.append(self.opaque(node, fakes[index], key))
            for name, tensors in targets.items():
                if index < len(tensors):
                    of, fake, place = tensors[index]
                    value: Any = self.opaque(of, fake, ("written", name, key))
                    self.write_tensor(place, value, node)
        return results

    def _functionalized(self, node: fx.Node, call: FunctionalizedCall) -> list[Any] | None:
        """Evaluates a call that writes copies as the one that writes in place; it returns the copies, too.

        None where it writes views of which nothing is known.
        """
        written = [view.base for view in pytree.tree_leaves([*call.writes.values()]) if view is not None]
        overlapping: list[Hashable] = [tuple(written)] if len({*written}) < len(written) else []
        values: dict[str, Any] = {}
        for name, view in call.writes.items():
            values[name] = pytree.tree_map(lambda each: each and call.bases[each.base], view)
            if isinstance(view, WrittenView) and view.view is not None:
                found = self._written_view(node, call.bases[view.base], view, call.op)
                if found is None:
                    return None
                values[name], place = found
                overlapping += [((name, None), place)] if place.overlaps_itself() else []
            elif isinstance(view, list) and any(each.view is not None for each in view):
                return None
        args, kwargs = bind_named(call.op, {**call.reads, **values})
        made = self._call(call.op, args, kwargs)
        key: Hashable = (*made, "overlapping", tuple(overlapping)) if overlapping else made
        key = self._after_others(is_seeded(call.op), not is_function(call.op), key)
        fakes = list(self._facts[node])
        results = [
            self.opaque(node, fake, key, index if call.num_results > 1 else None)
            for index, fake in enumerate(fakes[: call.num_results])
        ]
        for index, fake in enumerate(fakes[call.num_results :]):
            places = [place for place, base in enumerate(written) if base == index]
            copy = self._read(call.bases[index])  # of what nobody writes
            results.append(self.opaque(node, fake, ("written", places[-1], key)) if places else copy)
        if str(call.op) == BOUNDS_CHECK:
            count, mode = (args[_place_of(name, call.op)] for name in ("warning", "bounds_check_mode"))
            number = call.num_results + call.bases.index(count)
            results[number] = self._counted(count, mode, results[number])
        return results

    def _written_view(
        self, node: fx.Node, base: fx.Node, view: WrittenView, target: Any
    ) -> tuple[Argument, View] | None:
        """Returns what an operator is given that writes a view of a tensor, and how that lies."""
        fake, (of,) = self._facts[base], self._facts.places[base]
        mode = fake_mode_of(fake)
        if mode is None or of is None or view.view is None or view.view in RULES:
            return None
        seen = fake_call(mode, view.view, (fake, *view.args), {})
        if (place := View.of(seen)) is None or not place.is_known:
            return None
        copy = of._replace(root=(node, None))  # which has memory of its own
        given = self._numbers(self._read(base), self._facts.layout_of(fake, copy, view.view))
        key = self._in_memory(self._call(view.view, (given, *view.args), {}), view.view, base, is_copy=True)
        value = self.opaque(node, seen, key)
        assert isinstance(value, Value)
        layout = self._facts.layout_of(seen, copy._replace(view=place), target)
        return Argument(value.number, layout), place

    def _check(self, node: fx.Node) -> tuple[Hashable, Check]:
        """Returns what a check is made of, whatever its words are, and the check."""
        args, kwargs = evaluated(self._arguments(node), self._number)
        words = [repr(each) for each in args if isinstance(each, str)] or [str(node.target)]
        key = str(node.target), freeze([each for each in args if not isinstance(each, str)]), freeze(kwargs)
        outside = {each[0]: held for each, held in self._held.items() if each[0].op in ("placeholder", "get_attr")}
        names = {each: self._inputs.get(each, f"the attribute {each.target}") for each in outside}
        written = {names[each]: held.value.number for each, held in outside.items()}
        return key, Check(f"the check {' '.join(words)}", node, written)

    def _lies(self, nodes: Mapping[str, fx.Node], *, is_step: bool) -> dict[str, frozenset[str]]:
        """Returns in whose memory some tensors lie, of each other's and of those from outside; and how they lie.

        Gradients are copied where they do not lie as their parameters do, or are one, in a step with another output.
        """
        outside = {node.name: node for node in self._facts.places if node.op in ("placeholder", "get_attr")}
        places = [
            (place, name, node)
            for name, node in {**outside, **nodes}.items()
            for place in self._facts.places[node]
            if place is not None
        ]
        found: dict[str, set[str]] = {name: set() for name in nodes}
        for (_, name, node), (_, other, its) in self._touching(places):
            are_gradients = [each.startswith((GRADIENT, VALUE) if is_step else GRADIENT) for each in (name, other)]
            are_copied = (any if is_step else all)(are_gradients) and {name, other} <= nodes.keys()
            if node is not its or not are_copied:
                found.get(name, set()).add(f"the memory of {other}")
                found.get(other, set()).add(f"the memory of {name}")
        for (_, view), name, node in places:
            if name in found:
                layout = self._facts.layout(node, aten.mm.default)
                found[name].add(f"memory of {layout.device}")
                if name != LOSS and not name.startswith(GRADIENT):
                    steps = [step for size, step in zip(view.shape, view.strides, strict=True) if size != 1]
                    found[name] |= {f"strides {steps}", f"memory that begins at {layout.offset[1]}"}
        return {name: frozenset(others) for name, others in found.items()}

    def _counted(self, count: fx.Node, mode: Any, made: Result) -> Result:
        """Returns the count of bad ids behind a bounds check that finds ``made``.

        The CPU's writes it over the one before if it warns, and leaves that otherwise; others add to it.
        """
        if self._facts[count].device.type == "cpu" and type(mode) is int:
            return made if mode == WARNS else self._read(count)
        return self.opaque(count, self._facts[count], ("added", self._number(count), made.number))


def origin_of_padding(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str | None:
    """Returns the input of which a padded tensor is a part: other ranks' parts may be larger."""
    while node not in inputs:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.target not in RULES:
            return None
        node = node.all_input_nodes[0]
    return inputs[node]


@functools.cache
def takes_tensor(target: Any) -> bool:
    (schema,) = schemas(target)
    return str(schema.arguments[0].type) == "Tensor"


def _place_of(name: str, target: Any) -> int:
    (schema,) = schemas(target)
    return [argument.name for argument in schema.arguments].index(name)


def is_function(target: Any) -> bool:
    """Whether the results of an operator of FBGEMM that may have a state follow from its arguments."""
    return str(target) == BOUNDS_CHECK or TRACED_LOOKUP.fullmatch(str(target)) is not None


def _is_known(value: Any) -> bool:
    """Whether it is known of each element of a tensor, or of several, which one it is; of a size, which size."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_known, value))
    return not isinstance(value, Value) or value.dtype is None or value.pieces is not None
