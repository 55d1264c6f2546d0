"""What memory holds while a graph is evaluated: which nodes share it, and what writes leave there."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from graphpasses._torch.schemas import given_arguments
from graphpasses.analysis.effects import nodes_in
from graphpasses.graph import TrainGraph
from graphpasses.graph.nodes import freeze
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.proof.core.evaluated import Argument, Evaluated, Result
from graphpasses.proof.core.facts import Facts, Leaf, Place
from graphpasses.proof.core.operators import COMMUTATIVE, Call, is_element_by_element, name_of
from graphpasses.proof.core.values import Geometry, Value, Values, fills_alike, geometry

Tensor = TypeVar("Tensor", bound=tuple[Place, Any, Any])


@dataclass
class Held:
    """What a piece of memory that the graph writes holds."""

    node: fx.Node  # the one whose value fills it
    view: Any  # how that value lies there, see :class:`Place`
    value: Value | None = None  # what it holds now; None while no one wrote
    beyond: int | None = None  # the number of all that views have written beside it, in the same memory


class Memory:
    """The values of a graph's nodes as far as they are known, and the memory in which they lie."""

    def __init__(self, graph: TrainGraph, values: Values, facts: Facts) -> None:
        self._graph = graph
        self._table = values
        self._facts = facts
        self._done = Evaluated()
        self._waiting: dict[fx.Node, Any] = {}
        self._held: dict[Leaf, Held] = {}
        self._freed: dict[Leaf, fx.Node] = {}

    def _roots(self, node: fx.Node) -> set[Leaf]:
        """Returns in which memory the tensors of a node lie."""
        return {place.root for place in self._facts.places[node] if place is not None}

    def _look_for_freed(self, node: fx.Node) -> None:
        """Notes if an operator reads memory that another has freed; a view reads none."""
        for source in node.all_input_nodes if self._freed else ():
            for root in self._roots(source) & self._freed.keys():
                by = self._freed[root]
                if node.op == "output" or root not in self._roots(node):
                    self._done.broken.append((by, f"{by.name} frees {source.name}, which {node.name} reads"))

    def _read(self, node: fx.Node) -> Result:
        """Returns what a node's memory holds now."""
        value = self._done.values[node]
        if not self._held:
            return value
        if isinstance(value, list):
            return [self._read_tensor((node, index), each) for index, each in enumerate(value)]
        return self._read_tensor((node, None), value)

    def _read_tensor(self, leaf: Leaf, value: Result) -> Result:
        node, index = leaf
        place = self._facts.places[node][index or 0] if isinstance(value, Value) else None
        memory = None if place is None else self._held.get(place.root)
        if place is None or memory is None or memory.value is None:
            return value
        if place.view == memory.view:
            return memory.value
        if (seen := self._reshaped(memory.value, memory.view, place.view)) is not None:
            return seen
        # What lies beside the root is what it was, or what was written there.
        beside = None if _holds(memory.view, place.view) else (value.number, memory.beyond)
        key = ("part of memory", memory.value.number, memory.view, place.view, beside)
        fake = self._facts[node] if index is None else self._facts[node][index]
        return self.opaque(node, fake, key)

    def _write(self, node: fx.Node, value: Result, by: fx.Node) -> None:
        """Notes that an operator writes the memory of a node; what, if the node is all of it."""
        places = self._facts.places[node]
        values = value if isinstance(value, list) else [value] * len(places)
        for index, (place, each) in enumerate(zip(places, values, strict=True)):
            if place is not None:
                self._write_tensor(place, each, (by, index if len(places) > 1 else None))

    def _write_tensor(self, place: Place, value: Value | None, by: tuple[fx.Node, Hashable]) -> None:
        root, writer = place.root, by[0]
        for launch in self._waiting:
            if any(root in self._roots(source) for source in launch.all_input_nodes):
                reason = f"{writer.name} writes what {launch.name} sends, before anyone has waited for it"
                self._done.broken.append((writer, reason))
        of, fake = root[0], self._facts[root[0]] if root[1] is None else self._facts[root[0]][root[1]]
        memory = self._held.get(root)
        if memory is None:
            memory = self._held[root] = Held(of, self._facts.places[of][root[1] or 0].view)
        old = self._read_tensor(root, self._value_of(root))
        if value is None or not isinstance(old, Value):
            old_number = old.number if isinstance(old, Value) else -1
            key: Hashable = ("written", (old_number, memory.view, place.view), (self._key(writer), by[1]))
            value = self.opaque(of, fake, key)
        elif place.view != memory.view:
            whole = self._reshaped(value, place.view, memory.view)
            key = ("written in part", old.number, memory.view, place.view, value.number)
            value = self.opaque(of, fake, key) if whole is None else whole
        memory.value = value
        memory.node = writer
        if place.view != memory.view and not _holds(memory.view, place.view):
            memory.beyond = self._table.other(("written beyond", memory.beyond, value.number)).number
        # What else comes from outside in this memory, and lies there otherwise, may have changed, too.
        for other in self._beside(root):
            if other[0] not in self._done.values:  # a constant that is read later
                continue
            view = self._facts.places[other[0]][other[1] or 0].view
            held_beside = self._held.setdefault(other, Held(other[0], view))
            was = held_beside.value or self._value_of(other)
            beside: Hashable = ("written beside", self._numbers(was, None), value.number)
            held_beside.value = self.opaque(other[0], self._facts[other[0]], beside)
            held_beside.node = writer

    def _reshaped(self, value: Value, held: Any, seen: Any) -> Value | None:
        """Returns a value that lies in memory in one way as another reads it; None if that has not all its bytes."""
        one, two = _geometry(held), _geometry(seen)
        is_alike = one and two and fills_alike(one, two) and value.dtype == held[3] == seen[3]
        if not is_alike or value.pieces is None:
            return None
        return self._table.moved(value.dtype, seen[0], value.pieces)

    def _value_of(self, leaf: Leaf) -> Result:
        value = self._done.values[leaf[0]]
        return value[leaf[1]] if isinstance(value, list) else value  # type: ignore[index]

    def _beside(self, root: Leaf) -> list[Leaf]:
        """Returns what else comes from outside in the memory of a tensor that does."""
        return self._facts.beside.get(root, [])

    # ---- memory that overlaps -----------------------------------------------------------------------------

    def _overlaps(self, node: fx.Node, written: Collection[str]) -> Hashable:
        """Returns how what an operator writes overlaps with what else it is given; empty if it does not.

        It may then read what it has written. That makes no difference where it computes element by element, and reads
        the elements that it writes. ``written`` are names of arguments; of a function's, of the nodes.
        """
        tensors: list[tuple[Place, tuple[str, int | None], bool]] = []
        given = [(each.name, value, each.name in written) for each, value in given_arguments(node)]
        if not given:  # a function has no schema
            given = [(each.name, each, each.name in written) for each in node.all_input_nodes]
        for name, value, is_written in given:
            # A tensor that is in no list is read for all elements of the others.
            is_list = not isinstance(
                self._facts[value] if isinstance(value, fx.Node) else value, torch.Tensor
            )
            places = [place for each in nodes_in(value) for place in self._facts.places[each]]
            for number, place in enumerate(places):
                if place is not None:
                    tensors.append((place, (name, number if is_list else None), is_written))
        by_element = is_element_by_element(node.target)
        # Elements of one tensor may lie on each other.
        found: list[Hashable] = [
            (name, place.view) for place, name, is_written in tensors if is_written and _laps(place.view)
        ]
        for one, two in self._touching(tensors):
            is_alike = one[0].view == two[0].view and one[1][1] == two[1][1]
            is_itself = by_element and is_alike and not (one[2] and two[2])
            if (one[2] or two[2]) and not is_itself:
                found.append((one[1], one[0].view, two[1], two[0].view))
        return tuple(found)

    def _sharing(self, nodes: Mapping[str, fx.Node]) -> dict[str, frozenset[str]]:
        """Returns which of some tensors, and of those from outside, have bytes in common; none with itself."""
        outside = {node.name: node for node in self._facts.places if node.op in ("placeholder", "get_attr")}
        tensors = [
            (place, name, node)
            for name, node in {**outside, **nodes}.items()
            for place in self._facts.places[node]
            if place is not None
        ]
        found: dict[str, set[str]] = {name: set() for name in nodes}
        for (_, name, node), (_, other, its) in self._touching(tensors):
            if node is not its:  # a step copies a value that it returns twice
                found.get(name, set()).add(other)
                found.get(other, set()).add(name)
        return {name: frozenset(others) for name, others in found.items()}

    def _touching(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of tensors, each a place and more, that may have bytes in common."""
        by_memory: dict[Leaf, list[tuple[tuple[int, int], Tensor]]] = {}
        for each in tensors:
            root = each[0].root
            memory = min((root, *self._beside(root)), key=lambda leaf: leaf[0].name)
            by_memory.setdefault(memory, []).append((_extent(each[0].view), each))
        for some in by_memory.values():
            some.sort(key=lambda each: each[0])
            for index, ((_, end), one) in enumerate(some):
                for (start, _), two in some[index + 1 :]:
                    if start >= end:
                        break
                    yield one, two

    # ---- numbers --------------------------------------------------------------------------------------------------

    def _key(self, node: fx.Node) -> tuple[Hashable, ...]:
        """Returns what an operator's results depend on: its arguments' values, and how they lie in memory."""
        return self._call(node.target, node.args, node.kwargs)

    def _call(self, target: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
        args, kwargs = self._plain(target, args, kwargs)
        given = evaluated((args, kwargs), lambda node: self._argument(node, target))
        return self._call_of(target, *given)

    def _plain(self, target: Any, args: Any, kwargs: Any) -> Call:
        """Returns the arguments of a call as all that mean the same have them."""
        return args, kwargs

    def _as_read(self, target: Any, args: list[Any]) -> list[Any]:
        """Returns the arguments of a call as far as it reads them."""
        return args

    def _call_of(self, target: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
        args = self._as_read(target, args)
        if target in COMMUTATIVE and len(args) == 2 and not kwargs:
            args = sorted(args, key=_order)
        return ("call", name_of(target), freeze(args), freeze(kwargs))

    def _argument(self, node: fx.Node, target: Any) -> Hashable:
        return self._numbers(self._read(node), self._facts.layout_for(node, target))

    def _anywhere(self, node: fx.Node) -> Hashable:
        """Returns what an argument is to operators that read its elements wherever they lie."""
        return self._numbers(self._read(node), self._facts.layout(node))

    def _number(self, node: fx.Node) -> Hashable:
        return self._numbers(self._read(node), None)

    def _numbers(self, value: Result, layout: Any) -> Hashable:
        if isinstance(value, list):
            return tuple(
                self._numbers(each, None if layout is None else layout[index])
                for index, each in enumerate(value)
            )
        return Argument(value.number, layout) if isinstance(value, Value) else None

    def opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        """Returns a value into which no rule looks; its bits depend on ``key`` alone; of several it is ``part``."""
        if isinstance(fake, (list, tuple)):
            return [self.opaque(node, each, key, index) for index, each in enumerate(fake)]
        seen = geometry(fake)
        if seen is None:
            dtype = fake.dtype if isinstance(fake, torch.Tensor) else None
            value = self._table.other(("result", key, part, dtype), dtype)
            self._done.made.setdefault(value.source, node)  # type: ignore[arg-type]
            return value
        source = self._table.source(
            ("result", key, part, fake.dtype, str(fake.device), seen[0]), fake.numel()
        )
        self._done.made.setdefault(source, node)
        return self._table.tensor(fake.dtype, seen[0], source)


def _order(argument: Any) -> Any:
    is_value = isinstance(argument, Argument)
    return (0, argument.number, str(argument.layout)) if is_value else (1, 0, str(argument))


def _geometry(view: Any) -> Geometry | None:
    """Returns how a tensor lies in memory; None where that depends on data, or it is read conjugated or negated."""
    shape, strides, offset, _, *marks = view
    is_known = all(type(each) is int for each in (*shape, *strides, offset))
    return (shape, strides, offset) if is_known and not any(marks) else None


def _extent(view: Any) -> tuple[int, int]:
    """Returns between which bytes of its memory a tensor lies; all where that depends on data."""
    if (known := _geometry((*view[:4],))) is None:
        return 0, sys.maxsize
    (shape, strides, offset), dtype = known, view[3]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = offset + last + 1 if math.prod(shape) else offset
    return offset * dtype.itemsize, end * dtype.itemsize


def _laps(view: Any) -> bool:
    """Whether two elements of a tensor may have one place in memory."""
    shape, strides, *_ = view
    end = 0
    for stride, size in sorted(zip(strides, shape, strict=True), key=lambda each: str(each[0]).zfill(20)):
        if size == 1 or size == 0:
            continue
        if type(stride) is not int or type(size) is not int:
            return False  # as far as is known
        if stride <= end:
            return True
        end += (size - 1) * stride
    return False


def _holds(held: Any, seen: Any) -> bool:
    """Whether all bytes of a tensor ``seen`` are such of one that is held, and has no gaps."""
    if _geometry(held) is None or _geometry(seen) is None:
        return False
    (start, stop), (first, end) = _extent(held), _extent(seen)
    return start <= first and end <= stop and math.prod(held[0]) * held[3].itemsize == stop - start


def evaluated(args: Any, read: Callable[[fx.Node], Any]) -> Any:
    """Returns arguments of a call with what ``read`` returns in the place of nodes."""
    if isinstance(args, fx.Node):
        return read(args)
    if isinstance(args, (list, tuple)):
        return [evaluated(each, read) for each in args]
    if isinstance(args, dict):
        return {name: evaluated(each, read) for name, each in args.items()}
    if isinstance(args, torch.SymInt):
        return str(size_expression(args))
    if isinstance(args, slice):
        return ["slice", *evaluated([args.start, args.stop, args.step], read)]
    return args
