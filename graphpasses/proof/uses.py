"""Which calls read the values that get gradients; autograd adds what they give in order, from the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import fx

from graphpasses.graph import argument


class Variable(NamedTuple):
    """A value that gets a gradient: of one number may be several, each made by a call, and each with its own."""

    number: int
    place: int  # among those of its number


Use = str | tuple["Variable | Use", ...]
"""What a call that reads a value returns; all uses of a copy, which are added apart; or the name of an output."""

_Made = tuple[int, fx.Node]  # a number, and the call that has made or written it


class _Copy(NamedTuple):
    made: _Made


class Uses:
    """Notes which calls read the values that get gradients; ``is_part`` says what takes one of a call's results."""

    def __init__(self, is_part: Callable[[fx.Node], bool]) -> None:
        self._is_part = is_part
        self._writers: dict[fx.Node, fx.Node] = {}  # by node, the last call that wrote what it was given of it
        self._makers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._uses: defaultdict[_Made, list[Use | _Copy]] = defaultdict(list)
        self._copies: set[_Made] = set()

    def value(self, node: fx.Node, number: int) -> _Made:
        """Returns the value that is read of a node, by its number."""
        while node not in self._writers and self._is_part(node):
            node = argument(node)
        made = number, self._writers.get(node, node)
        self._variable(made)
        return made

    def note_write(self, node: fx.Node, by: fx.Node) -> None:
        """Notes that a call has written what it was given of a node."""
        self._writers[node] = by

    def note(self, node: fx.Node, used: Iterable[_Made], numbers: Iterable[int]) -> None:
        """Notes that a call reads values, and returns those of some numbers; what it returns as it was is a copy."""
        used, numbers = list(used), list(dict.fromkeys(numbers))
        copied = {number for number, _ in used}.intersection(numbers)
        self._copies |= {(number, node) for number in copied}
        results = tuple(self._variable((number, node)) for number in numbers if number not in copied)
        for each in used:
            self._uses[each].append(_Copy((each[0], node)) if each[0] in copied else results)

    def note_output(self, name: str, values: Iterable[_Made]) -> None:
        """Notes that an output has values, whose gradients come first."""
        for each in values:
            self._uses[each].append(name)

    def by_value(self) -> dict[Variable, list[Use]]:
        """Returns what each value is read by, in order."""
        return {self._variable(each): self._added(each) for each in list(self._uses) if each not in self._copies}

    def _variable(self, made: _Made) -> Variable:
        number, node = made
        makers = self._makers[number]
        if made not in self._copies and node not in makers:
            makers.append(node)
        return Variable(number, makers.index(node) if node in makers else -1)

    def _added(self, made: _Made) -> list[Use]:
        """Returns what is added to a value's gradient; what a copy gets is summed first."""
        uses, found = self._uses[made], list[Use]()
        for each in uses:
            if not isinstance(each, _Copy):
                found.append(each)
                continue
            added = self._added(each.made)
            is_same_sum = len(added) == 1 or len(uses) == 1
            found += added if is_same_sum else [tuple(added)] if added else []
        return found


def numbers_in(uses: Iterable[Variable | Use]) -> Iterator[int]:
    """Yields the numbers of all that calls return that read a value."""
    for each in uses:
        if isinstance(each, Variable):
            yield each.number
        elif not isinstance(each, str):
            yield from numbers_in(each)
