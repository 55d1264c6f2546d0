"""What Python computes with an optimizer's numbers at each step: what it decides by them, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from graphpasses.state.keys import MISSING

Number: TypeAlias = tuple[int | str, str]
"""Names a number: the index of its group and e.g. ``"lr"`` or ``"betas[0]"``, or the FQN of a parameter and a name of
its state.
"""


@dataclass(frozen=True)
class Place:
    """Where a value stands among those of :class:`Arithmetic`."""

    index: int


@dataclass(frozen=True)
class Call:
    """A call of one of Python's operators or functions."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # places, or values
    numbers: frozenset[Number]  # from which it follows
    answer: Any = MISSING  # by which something was decided

    @property
    def decides(self) -> bool:
        return self.answer is not MISSING


@dataclass(frozen=True)
class Arithmetic:
    """Calls in order, which run with Python's own rounding and types until one answers otherwise."""

    inputs: Mapping[Number, Place] = field(default_factory=dict)
    calls: Mapping[Place, Call] = field(default_factory=dict)
    left: Mapping[Number, Any] = field(default_factory=dict)  # of numbers that the step changes: a place, or a value

    def needed(self) -> Arithmetic:
        """Returns the calls that something is decided by, or left, and those before them."""
        needed = {each for each in self.left.values() if isinstance(each, Place)}
        for place, call in reversed([*self.calls.items()]):
            if call.decides or place in needed:
                needed |= {place, *(each for each in call.args if isinstance(each, Place))}
        return Arithmetic(self.inputs, {p: c for p, c in self.calls.items() if p in needed}, self.left)

    def decided(self, *calls: Call) -> Arithmetic:
        """Returns the same, which decides by other calls, too."""
        first = max((each.index for each in (*self.inputs.values(), *self.calls)), default=-1) + 1
        others = {Place(first + index): call for index, call in enumerate(calls)}
        return Arithmetic(self.inputs, {**self.calls, **others}, self.left)

    @property
    def decides_by_counts(self) -> bool:
        return any(self._counts(call) for call in self.calls.values())

    def first_changed(self, numbers: Mapping[Number, Any], *, by_counts: bool | None = None) -> Call | None:
        """Returns the first decision that falls otherwise by other numbers; None if there is none.

        ``by_counts`` is whether it is one by numbers that the step itself changes.
        """
        for call, value in self._run(self._values(numbers)):
            if call.decides and repr(value) != repr(call.answer):
                return call if by_counts in (None, self._counts(call)) else None
        return None

    def leaves(self, numbers: Mapping[Number, Any]) -> dict[Number, Any]:
        """Returns what the step leaves of the numbers that it changes."""
        for _ in self._run(values := self._values(numbers)):
            pass
        return {number: values[each] if isinstance(each, Place) else each for number, each in self.left.items()}

    def always_other(self, numbers: Mapping[Number, Any], num_steps: int = 4) -> Call | None:
        """Returns what builds in a number that is another at each of the next steps; None if nothing does."""
        seen: dict[int, set[str]] = {}
        for _ in range(num_steps):
            try:
                for index, (call, value) in enumerate(self._run(self._values(numbers))):
                    if call.decides and type(value) is not bool:
                        seen.setdefault(index, set()).add(repr(value))
                numbers = {**numbers, **self.leaves(numbers)}
            except (ArithmeticError, ValueError):  # behind a decision that falls otherwise
                return None
        calls = [*self.calls.values()]
        return next((calls[index] for index, each in seen.items() if len(each) == num_steps), None)

    def _counts(self, call: Call) -> bool:
        return call.decides and not call.numbers.isdisjoint(self.left)

    def _values(self, numbers: Mapping[Number, Any]) -> dict[Place, Any]:
        return {place: as_python(numbers[number]) for number, place in self.inputs.items()}

    def _run(self, values: dict[Place, Any]) -> Iterator[tuple[Call, Any]]:
        for place, call in self.calls.items():
            args = (values[each] if isinstance(each, Place) else each for each in call.args)
            try:
                values[place] = call.function(*args)
            except (TypeError, ValueError) as error:
                if not call.decides:
                    raise
                values[place] = error  # as of a fraction that is to be a whole number
            yield call, values[place]


NO_ARITHMETIC = Arithmetic()


def as_python(value: Any) -> Any:
    """Returns a number of a subclass, as numpy's, as Python's own."""
    return float(value) if isinstance(value, float) else value
