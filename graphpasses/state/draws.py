"""Numbers that a step draws from Python's and NumPy's generators: each call draws them first, and they are inputs."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import torch

from graphpasses.errors import CaptureError
from graphpasses.state.keys import FunctionStandIn, attributes_of, is_carried_number, key_of, random_state
from graphpasses.state.origin import is_users_module


@dataclass(frozen=True)
class Draw:
    """A call of a function of ``random`` or ``numpy.random`` that draws one number."""

    name: str
    function: Callable[..., Any] = field(compare=False)
    arguments: str  # what it was given
    args: tuple[Any, ...] = field(compare=False)
    kwargs: dict[str, Any] = field(compare=False)
    kind: type = field(default=float, compare=False)  # of what it brought when the step was captured

    def number(self) -> Any:
        """Draws it; raises if no tensor can carry it."""
        value = self.function(*self.args, **self.kwargs)
        if type(value) is not self.kind or not is_carried_number(value):
            raise CaptureError(
                f"{self.name} brought {value!r}, and a number ({self.kind.__name__}) when the step was captured, "
                "which reads it as one. Draw it before the step, and give it in the batch"
            )
        return value


class DrawnError(CaptureError):
    """A step draws these numbers, which are to be its inputs."""


def draw(draws: Sequence[Draw]) -> list[Any]:
    """Draws numbers, in order."""
    return [each.number() for each in draws]


def drawn_next(draws: Sequence[Draw]) -> list[Any]:
    """Returns the numbers that would be drawn next, and draws none."""
    if not draws:
        return []
    with draws_undone():
        return draw(draws)


@contextmanager
def draws_undone() -> Iterator[None]:
    """Lets what follows the block draw the numbers of Python's and NumPy's generators that the block drew."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def draw_states() -> dict[str, torch.Tensor]:
    """Returns the states of Python's and NumPy's generators, as bytes."""
    found = {module.__name__: random_state(generator) or b"" for module, generator in _generators()}
    return {name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in found.items()}


@contextmanager
def torch_draws_undone() -> Iterator[None]:
    """Lets what follows the block draw the numbers of torch's generator on the CPU that the block drew."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def draws_traced(draws: Sequence[Draw], numbers: Sequence[Any]) -> Iterator[list[Draw]]:
    """Lets code get traced ``numbers`` in place of those that it drew before; yields what it draws now.

    Without any, it draws. So do torch's own code and other threads, and calls that bring no number, as an array, or
    are given what only running tells, which is refused elsewhere.
    """
    found: list[Draw] = []
    thread, is_over = get_ident(), False

    def drawing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = inspect.currentframe()
            caller = frame and frame.f_back and frame.f_back.f_back
            is_torchs = caller and caller.f_globals.get("__name__", "").partition(".")[0] == "torch"
            is_steps = not (is_over or is_torchs) and get_ident() == thread
            if not is_steps or not (key := key_of((args, kwargs))).is_plain:
                return function(*args, **kwargs)
            now = Draw(name, function, str(key), *copy.deepcopy((args, kwargs)))
            if len(found) < len(draws) and draws[len(found)] == now:
                found.append(draws[len(found)])
                return numbers[len(found) - 1]
            value = function(*args, **kwargs)
            if is_carried_number(value):
                found.append(replace(now, kind=type(value)))
            return value

        return call

    stand_ins = {
        function: FunctionStandIn(function, drawing(f"{module.__name__}.{name}", function))
        for module, generator in _generators()
        for name, function in vars(module).items()
        if getattr(function, "__self__", None) is generator and name not in _LEFT_OUT
    }
    with ExitStack() as restored:
        for names, name, function in _places(stand_ins):
            restored.callback(names.__setitem__, name, function)
            names[name] = stand_ins[function]
        try:
            yield found
        finally:
            is_over = True  # a module that was imported meanwhile keeps what it found


def _generators() -> Iterator[tuple[Any, Any]]:
    """Yields the modules whose functions draw from a generator of their own, and that."""
    yield random, random.getstate.__self__  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random, numpy.random.get_state.__self__


def _places(functions: Collection[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields the globals that have one of these functions, also those of ``from random import random``."""
    for module in [*sys.modules.values()]:
        if not isinstance(module, ModuleType) or module in _WITHOUT:
            continue
        names = attributes_of(module) or {}  # not `vars`, which is watched
        found = [(name, each) for name, each in names.items() if type(each) in _METHODS and each in functions]
        if not found and not is_users_module(module):
            _WITHOUT.add(module)
        for name, each in found:
            yield names, name, each


_METHODS = MethodType, BuiltinMethodType
_WITHOUT: set[ModuleType] = set()  # of the libraries', which stay as they are
# What draws nothing, and bits, of which a tensor carries as many as it can.
_LEFT_OUT = {"seed", "getstate", "setstate", "get_state", "set_state", "getrandbits"}
