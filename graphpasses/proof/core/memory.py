"""What memory holds while a graph is evaluated: which nodes share it, and what writes leave there."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx

from graphpasses._torch.schemas import given_arguments
from graphpasses.analysis.effects import nodes_in
from graphpasses.graph.nodes import freeze
from graphpasses.proof.core.facts import Facts, Leaf, Place
from graphpasses.proof.core.operators import COMMUTATIVE, is_element_by_element, name_of, out_of_place
from graphpasses.proof.core.values import Argument, Result, Value, Values
from graphpasses.proof.core.views import View

Tensor = TypeVar("Tensor", bound=tuple[Place, Any, Any])


class Held(NamedTuple):
    """What a piece of memory holds that the graph has written."""

    by: fx.Node  # the last that wrote it
    value: Value  # what the tensor holds that was first there
    beyond: int | None  # the number of all that views have written beside that tensor, in the same memory


class Memory:
    """The values of a graph's nodes as far as they are known, and the memory in which they lie."""

    def __init__(self, values: Values, facts: Facts) -> None:
        self._table = values
        self._facts = facts
        self._of: dict[fx.Node, Result] = {}  # what each node has made
        self._made: dict[int, fx.Node] = {}  # by the number of a source the first node that made it
        self._held: dict[Leaf, Held] = {}

    def _read(self, node: fx.Node) -> Result:
        """Returns what a node's memory holds now."""
        value = self._of[node]
        if not self._held:
            return value
        if isinstance(value, list):
            return [self._read_tensor((node, index), each) for index, each in enumerate(value)]
        return self._read_tensor((node, None), value)

    def _read_tensor(self, leaf: Leaf, value: Result) -> Result:
        place = self._place_of(leaf) if isinstance(value, Value) else None
        if place is None or (held := self._held.get(place.root)) is None:
            return value
        view = self._view_of(place.root)
        if (seen := self._reshaped(held.value, view, place.view)) is not None:
            return seen
        # What lies beside the root is what it was, or what was written there.
        beside = None if view.holds(place.view) else (value.number, held.beyond)
        whole, view = self._flat(held.value, view)
        return self._opaque(leaf, ("part of memory", whole.number, view, place.view, beside))

    def _write(self, node: fx.Node, value: Result, by: fx.Node) -> None:
        """Notes that an operator writes a value, or several, into the memory of a node."""
        places = self._facts.places[node]
        values = value if isinstance(value, list) else [value] * len(places)
        for place, each in zip(places, values, strict=True):
            if place is not None:
                self.write_tensor(place, each, by)

    def write_tensor(self, place: Place, value: Value, by: fx.Node) -> None:
        """Notes that an operator writes a value where a tensor lies."""
        root = place.root
        view, beyond = self._view_of(root), self._held[root].beyond if root in self._held else None
        whole = self._reshaped(value, place.view, view)
        if whole is None:
            key = ("written in part", self._now(root).number, view, place.view, value.number)
            whole = self._opaque(root, key)
            if not view.holds(place.view):
                beyond = self._table.other(("written beyond", beyond, whole.number)).number
        self._held[root] = Held(by, whole, beyond)
        # What else comes from outside in this memory, and lies there otherwise, may have changed, too.
        for other in self._facts.beside[root]:
            beyond = self._held[other].beyond if other in self._held else None
            key = ("written beside", self._now(other).number, self._view_of(other), view, whole.number)
            self._held[other] = Held(by, self._opaque(other, key), beyond)

    def _reshaped(self, value: Value, held: View, seen: View) -> Value | None:
        """Returns a value that lies in memory in one way as another reads it; None if that has not all its bytes."""
        if held == seen:
            return value
        if value.pieces is None or not held.has_elements_of(seen):
            return None
        return self._table.moved(value.dtype, seen.shape, value.pieces)

    def _flat(self, value: Value, view: View) -> tuple[Value, View]:
        """Returns a tensor without gaps as a vector, as its memory is the same in any shape; others as they are."""
        flat = view._replace(shape=(math.prod(view.shape),), strides=(1,)) if view.is_known else view
        found = self._reshaped(value, view, flat)
        return (value, view) if found is None else (found, flat)

    def _now(self, root: Leaf) -> Value:
        """Returns what a tensor that is first in its memory holds now."""
        value = self._of[root[0]]
        found = self._read_tensor(root, value if root[1] is None else value[root[1]])
        assert isinstance(found, Value)
        return found

    def _place_of(self, leaf: Leaf) -> Place | None:
        return self._facts.places[leaf[0]][leaf[1] or 0]

    def _view_of(self, root: Leaf) -> View:
        place = self._place_of(root)
        assert place is not None
        return place.view

    # ---- memory that overlaps -------------------------------------------------------------------------------------

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
            is_list = not isinstance(self._facts[value] if isinstance(value, fx.Node) else value, torch.Tensor)
            places = [place for each in nodes_in(value) for place in self._facts.places[each]]
            for number, place in enumerate(places):
                if place is not None:
                    tensors.append((place, (name, number if is_list else None), is_written))
        by_element = is_element_by_element(node.target)
        written_views = [(name, place.view) for place, name, is_written in tensors if is_written]
        found: list[Hashable] = [each for each in written_views if each[1].overlaps_itself()]
        for one, two in self._touching(tensors):
            is_alike = one[0].view == two[0].view and one[1][1] == two[1][1]
            is_itself = by_element and is_alike and not (one[2] and two[2])
            if (one[2] or two[2]) and not is_itself:
                found.append((one[1], one[0].view, two[1], two[0].view))
        return tuple(found)

    def _touching(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of tensors, each a place and more, that may have bytes in common."""
        by_memory: dict[Leaf, list[tuple[tuple[int, int], Tensor]]] = {}
        for each in tensors:
            by_memory.setdefault(self._memory_of(each[0].root), []).append((each[0].view.extent(), each))
        for some in by_memory.values():
            some.sort(key=lambda each: each[0])
            for index, ((_, end), one) in enumerate(some):
                for (start, _), two in some[index + 1 :]:
                    if start >= end:
                        break
                    yield one, two

    def _memory_of(self, root: Leaf) -> Leaf:
        """Returns which tensor stands for all in one memory."""
        return min((root, *self._facts.beside[root]), key=lambda leaf: leaf[0].name)

    # ---- numbers --------------------------------------------------------------------------------------------------

    def _key(self, target: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
        """Returns what an operator's results depend on, from the numbers of its arguments."""
        tensors = [self._table[each.number] for each in args if isinstance(each, Argument)]
        is_complex = any(each.dtype is not None and each.dtype.is_complex for each in tensors)
        if out_of_place(target) in COMMUTATIVE and not kwargs and len(tensors) == len(args) == 2 and not is_complex:
            args = sorted(args, key=str) if tensors[0].dtype == tensors[1].dtype else args
        return ("call", name_of(target, is_complex=is_complex), freeze(args), freeze(kwargs))

    def _argument(self, node: fx.Node, target: Any = None) -> Hashable:
        """Returns what an argument is to an operator, or wherever it begins: its value, and how it lies."""
        return self._numbers(self._read(node), self._facts.layout(node, target))

    def _number(self, node: fx.Node) -> Hashable:
        return self._numbers(self._read(node), None)

    def _numbers(self, value: Result, layout: Any) -> Hashable:
        if isinstance(value, list):
            layouts = [None] * len(value) if layout is None else layout
            return tuple(map(self._numbers, value, layouts))
        return Argument(value.number, layout) if isinstance(value, Value) else None

    def _opaque(self, leaf: Leaf, key: Hashable) -> Value:
        fake = self._facts[leaf[0]] if leaf[1] is None else self._facts[leaf[0]][leaf[1]]
        return cast(Value, self.opaque(leaf[0], fake, key))

    def opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        """Returns a value into which no rule looks; its bits depend on ``key`` alone; of several it is ``part``."""
        if isinstance(fake, (list, tuple)):
            return [self.opaque(node, each, key, index) for index, each in enumerate(fake)]
        view = View.of(fake)
        if view is None or not view.is_known:
            dtype = fake.dtype if isinstance(fake, torch.Tensor) else None
            value = self._table.other(("result", key, part, dtype), dtype)
            self._made.setdefault(value.source, node)  # type: ignore[arg-type]
            return value
        of = ("result", key, part, fake.dtype, str(fake.device), view.shape)
        source = self._table.source(of, math.prod(view.shape))
        self._made.setdefault(source, node)
        return self._table.tensor(fake.dtype, view.shape, source)
