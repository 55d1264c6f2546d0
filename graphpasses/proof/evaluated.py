"""What a graph does, in numbers of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from torch import fx

from graphpasses.proof.core.values import Result, Value


@dataclass(frozen=True)
class Collective:
    """One launch."""

    node: fx.Node
    sent: tuple[Value, ...]  # what this rank gives
    group: str  # name of its process group
    arguments: Hashable  # numbers of its other arguments
    is_followed: bool  # whether the result is followed to each of the all-to-alls that it carries


class Check(NamedTuple):
    """A call that raises an error unless something is so."""

    name: str  # what people call it
    node: fx.Node
    written: Mapping[str, int]  # by name, the numbers of what the graph has written outside when it is made


class Variable(NamedTuple):
    """A value that gets a gradient: of one number may be several, each made by a call, and each with its own."""

    number: int
    place: int  # among those of its number


class Touch(NamedTuple):
    """A call that reads, writes or returns what lies in some memory."""

    call: tuple[str, bool]  # what is called, or nothing where it makes the memory; and whether with gradients
    numbers: tuple[int, ...]  # of what it is given and returns; where it makes the memory, of what lies there


Use = str | tuple["Variable | Use", ...]
"""What a call that reads a value returns; all uses of a copy, which are added apart; or the name of an output."""


def numbers_in(uses: Iterable[Variable | Use]) -> Iterator[int]:
    """Yields the numbers of all that calls return that read a value."""
    for each in uses:
        if isinstance(each, Variable):
            yield each.number
        elif not isinstance(each, str):
            yield from numbers_in(each)


@dataclass
class Evaluated:
    """What a graph does, in numbers of values."""

    values: dict[fx.Node, Result] = field(default_factory=dict)
    # By what people call them: the loss, the gradient of a parameter, what is written into a buffer; of a
    # tied parameter each output that has one.
    outputs: dict[str, Value | None] = field(default_factory=dict)
    # By the names of outputs, the others, and the tensors from outside, in whose bytes they lie, too, and how.
    lies: dict[str, frozenset[str]] = field(default_factory=dict)
    # By what people call them: the tensors from outside that the graph writes.
    written: dict[str, Value] = field(default_factory=dict)
    # By what they are made of, the first checks: those after it of the same raise nothing.
    checks: dict[Hashable, Check] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)  # the launches, in order
    # By the calls that unpack them, the arguments of the all-to-alls that travelled as one.
    unpacked: dict[fx.Node, list[Hashable]] = field(default_factory=dict)
    # What makes the result depend on chance, such as a write to what a collective still reads.
    broken: list[tuple[fx.Node, str]] = field(default_factory=list)
    axioms: set[str] = field(default_factory=set)  # the names of those that were used
    nodes: dict[str, fx.Node] = field(default_factory=dict)  # those of outputs
    # By the number of a value the first node that has it.
    makers: dict[int, fx.Node] = field(default_factory=dict)
    # By the number of a source the first node that made it.
    made: dict[int, fx.Node] = field(default_factory=dict)
    # Of a graph whose gradients autograd computes: by value that gets one, what each call that reads it returns,
    # in the order of the calls.
    uses: dict[Variable, list[Use]] = field(default_factory=dict)
    # What no rule could look into, so that a difference may be none; empty if there is no such thing.
    unknown: str = ""
    random_state: int = 0  # the number of the state in which the graph leaves the generator of random numbers
    hidden_state: int = 0  # likewise of calls that may have a state of their own
    # Of such a graph: the calls that touch each memory that is written and gets a gradient, in order.
    touched: Counter[tuple[Touch, ...]] = field(default_factory=Counter)
    context: int = 0  # likewise of what is set around calls: whether gradients are on, autocast

    def numbers(self) -> set[int]:
        """Returns the numbers of what a graph computes, or uses, whose gradients autograd computes."""
        used = (value.number for value in self.uses)
        return {*self.makers, *used, *numbers_in(chain.from_iterable(self.uses.values()))}

    def go_on(self, then: Evaluated) -> set[str]:
        """Adds what the update does after this graph, on what this one has left; returns the names of that."""
        names = {name: f"{name} of the update" for name in then.outputs}
        self.outputs |= {names[each]: value for each, value in then.outputs.items()}
        self.lies |= {names[each]: others for each, others in then.lies.items()}
        self.nodes |= {names.get(each, each): node for each, node in then.nodes.items()}
        self.written |= then.written
        self.checks = then.checks | self.checks
        self.collectives += then.collectives
        self.broken += then.broken
        self.axioms |= then.axioms
        self.random_state, self.hidden_state = then.random_state, then.hidden_state
        return {*names.values(), *then.written}


def are_touched_alike(one: Evaluated, two: Evaluated) -> bool:
    """Whether the same calls touch what two graphs write, and values, where they differ, that one alone has."""
    differing = (one.touched - two.touched, two.numbers()), (two.touched - one.touched, one.numbers())
    calls = [Counter(tuple(each.call for each in touches) for touches in of.elements()) for of, _ in differing]
    return calls[0] == calls[1] and not any(
        known.issuperset(chain.from_iterable(each.numbers for each in touches))
        for of, known in differing
        for touches in of
    )
