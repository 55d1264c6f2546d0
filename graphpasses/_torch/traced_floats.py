"""Floats that are traced: what code decides where it compares them, and what torch may ask of them."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import run_node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.types import py_sym_types
from torch.utils._sympy import functions
from torch.utils._sympy.symbol import SymT, symbol_is_type

from graphpasses._torch.patching import Patch, PatchSet

_ORDER = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_le, _lt = partial(sympy.Le, evaluate=False), partial(sympy.Lt, evaluate=False)


@contextmanager
def comparisons_told(told: Callable[..., None]) -> Iterator[None]:
    """Tells what is true of floats that the block compares where sympy answers without asking for their values."""
    with ExitStack() as patches:
        for kind, name in itertools.product((torch.SymFloat, torch.SymInt), _ORDER):
            magic = f"__{name}__"
            told_of = _telling(name, told, getattr(kind, magic))
            patches.enter_context(mock.patch.object(kind, magic, told_of))
        yield


def _telling(name: str, told: Callable[..., None], compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps a comparison. Sympy knows neither nan nor rounding: ``v != v`` is false to it, ``v + 1e-20 > v`` true."""

    def run(one: Any, other: Any) -> Any:
        answer = compare(one, other)
        is_float = any(isinstance(each, (torch.SymFloat, float)) for each in (one, other))
        truth = answer.node.expr if isinstance(answer, torch.SymBool) else answer
        if is_float and truth in (True, False, sympy.true, sympy.false):
            sides = [each.node.expr if isinstance(each, py_sym_types) else each for each in (one, other)]
            if sides[0] == sides[1]:  # of all but nan, which a sum of infinities is, too
                symbols = sympy.sympify(sides[0]).free_symbols
                is_read = sides[0] in symbols
                known = [_le(each, each) if is_read else _lt(sympy.Abs(each), sympy.oo) for each in symbols]
            else:
                known = [_ORDER[name if truth else _OPPOSITE[name]](*sides, evaluate=False)]
            told(known, one, other)
        return answer

    return run


def _asked(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps a comparison: where the user's code makes it of a number of a tensor, Dynamo breaks the graph."""

    def run(one: torch.SymFloat, other: Any) -> Any:
        # Torch's own code compares, too: a number with itself, to find it in a dict.
        if sys._getframe(1).f_code is run_node.__code__:
            symbols = one.node.expr.free_symbols
            if not symbols or any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in symbols):
                raise Unsupported("a number of a tensor is compared, which may be nan")
        return compare(one, other)

    return run


FLOATS_ASKED = PatchSet(*(Patch(f"torch:SymFloat.__{name}__", _asked) for name in _ORDER))
"""Lets Python decide by such a comparison, of which Dynamo would take the answer of all numbers but nan."""


def symbols_behind(
    number: Any, tracer: Any, bound_symbols: Callable[[fx.Node], Iterable[sympy.Symbol]]
) -> set[sympy.Symbol]:
    """Returns the floats that were read of tensors and from which a number follows that has no symbol any more."""
    if not isinstance(number, torch.SymFloat) or number.node.expr.free_symbols:
        return set()
    is_open: Any = number.node.shape_env.replace  # not decided by, to one value
    traced = proxy_tensor.get_proxy_slot(number, tracer, None)
    found, nodes = set[sympy.Symbol](), [] if traced is None else [traced.force().node]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        found |= {symbol for symbol in bound_symbols(node) if not symbol.is_integer and is_open(symbol).free_symbols}
        if not isinstance(node.meta.get("val"), torch.Tensor):
            nodes += (new := {*node.all_input_nodes} - seen)
            seen |= new
    return found


class StandIn:
    """Stands for a number, and computes with it by itself."""

    __slots__ = ()

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function of Python gives for numbers, of which this stands for one."""
        raise NotImplementedError


@contextmanager
def functions_traced(*, for_stand_ins: bool = False) -> Iterator[None]:
    """Lets ``max``, ``min``, powers and functions of ``math`` of numbers of tensors decide nothing: they are traced.

    Powers are Python's, whose base may be negative: torch would ask, for each, sympy. All functions of ``math`` let
    stand-ins compute, ``for_stand_ins``. NumPy computes with them as with numbers.
    """
    patch: Any = mock.patch.object
    floats = torch.SymFloat
    with (
        ExitStack() as patches,
        patch(floats, "__pow__", floats.__float_pow__),
        patch(floats, "__rpow__", floats.__rfloat_pow__),
        patch(floats, "__array_ufunc__", _by_numpy, create=True),
        patch(torch.SymInt, "__array_ufunc__", _by_numpy, create=True),
    ):
        for function in _INSTEAD if for_stand_ins else _OF_READ:
            instead = _INSTEAD[function]
            patches.enter_context(patch(builtins if function in (max, min) else math, function.__name__, instead))
        yield


def _by_numpy(_: Any, function: Any, method: str, *operands: Any, **kwargs: Any) -> Any:
    """Computes as NumPy does: numbers of Python take the type of its own, so of other than 64 bits it rounds to that
    type, and wraps: values decide then.
    """
    numpy: Any = sys.modules["numpy"]
    of_ints = any(isinstance(each, torch.SymInt) for each in operands)
    types = [each.dtype for each in operands if isinstance(each, (numpy.generic, numpy.ndarray))]
    is_exact = all(str(each) in _AS_PYTHON or (each.kind in "iu" and not of_ints) for each in types)
    given = [_for_numpy(each, numpy, is_exact=is_exact) for each in operands]
    return getattr(function, method)(*given, **kwargs)


def _for_numpy(operand: Any, numpy: Any, *, is_exact: bool) -> Any:
    if not isinstance(operand, (torch.SymFloat, torch.SymInt)):
        return operand
    if is_exact:
        return numpy.array(operand, dtype=object)
    return float(operand) if isinstance(operand, torch.SymFloat) else int(operand)


_AS_PYTHON = {"float64", "int64", "bool", "object"}  # types in which NumPy computes as Python does


def read_number(tensor: torch.Tensor, kind: type) -> Any:
    """Reads the number of a class that a tensor carries, which the trace then computes with as that class does."""
    number = tensor.item()
    return number if kind in (int, float) else _traced(as_numpy, number)


def as_numpy(number: Any) -> Any:
    """Returns a float as NumPy's, with which Python computes otherwise: it rounds to digits, divides by zero."""
    if not isinstance(number, torch.SymFloat):
        return sys.modules["numpy"].float64(number)
    node = number.node  # another, since the trace knows numbers by their nodes
    return torch.SymFloat(SymNode(node.expr, node.shape_env, float, None))  # type: ignore[no-untyped-call]


def _traced(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the trace: its node has the arguments in this order, and calls this function."""
    is_traced = proxy_tensor.get_proxy_mode() is not None
    return proxy_tensor.handle_sym_dispatch(function, args, {}) if is_traced else function(*args)


def _instead(function: Callable[..., Any], of_read: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a function of Python that lets stand-ins compute, and calls ``of_read`` with numbers of tensors."""

    chooses = function in (max, min)

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return function(*args, **kwargs)
        each = tuple(args[0]) if chooses and len(args) == 1 else args
        if all(isinstance(value, _NUMBERS) for value in each):
            for value in each:
                if isinstance(value, StandIn):
                    return value.computed(run, *each)
            is_users = _is_users(sys._getframe(1))
            if of_read is not None and any(_is_read(value, sizes=is_users) for value in each):
                return of_read(*each)
        return function(each) if each is not args else function(*args)

    _named_as(function, run)
    return run


_NUMBERS = int, float, StandIn, *py_sym_types


def _named_as(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Gives another function the name by which a graph, and a message, call a function."""
    other.__module__, other.__name__ = function.__module__, function.__name__


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    kind = getattr(functions, f"OpaqueUnaryFn_{function.__name__}")

    def traced(number: Any) -> Any:
        if not isinstance(number, py_sym_types):
            return function(number)
        node = number.node
        return torch.SymFloat(SymNode(kind(node.expr), node.shape_env, float, None))  # type: ignore[no-untyped-call]

    _named_as(function, traced)

    def of_read(number: Any, *base: Any) -> Any:
        if base:  # of log, as Python has it
            return of_read(number) / of_read(*base)
        return _traced(traced, number) if isinstance(number, py_sym_types) else function(number)

    return of_read


def _choosing(of_torch: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    # Torch itself puts the symbol first; beside nan Python takes the first.
    return lambda *args: functools.reduce(functools.partial(_traced, of_torch), map(_of_python, args))


def _of_python(value: Any) -> Any:
    # torch does not take NumPy's for one
    return float(value) if isinstance(value, float) else value


_OF_READ: dict[Callable[..., Any], Callable[..., Any]] = {
    # Those of one number of which torch knows what a condition on their result says.
    **{
        each: _of_one(each)
        for each in (
            *(math.acos, math.asin, math.asinh, math.atan, math.cos, math.cosh, math.exp),
            *(math.log, math.log2, math.sin, math.sinh, math.sqrt, math.tan, math.tanh),
        )
    },
    math.pow: lambda base, exponent: (base * 1.0) ** (exponent * 1.0),
    math.fabs: lambda number: abs(number * 1.0),
    max: _choosing(torch.sym_max),
    min: _choosing(torch.sym_min),
}
_INSTEAD = {
    each: _instead(each, _OF_READ.get(each))
    for each in (max, min, *(each for name, each in vars(math).items() if callable(each) and name[0] != "_"))
}


@contextmanager
def classes_of_python() -> Iterator[None]:
    """Lets code that is no tracer's ask numbers that are traced for their class, and find Python's."""
    with ExitStack() as patches:
        for traced, kind in _KINDS.items():
            patches.enter_context(mock.patch.object(traced, "__getattribute__", _of_class(kind)))
        yield


def _of_class(kind: type) -> Callable[[Any, str], Any]:
    def attribute(number: Any, name: str) -> Any:
        if name == "__class__" and _asks_as_user(sys._getframe(1)):
            return kind
        return object.__getattribute__(number, name)

    return attribute


def _asks_as_user(frame: FrameType | None) -> bool:
    """Whether a frame, or that for which Python's library runs it, is no tracer's."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if (package := name.partition(".")[0]) not in sys.stdlib_module_names:
            return package not in _TRACERS or name.startswith(_OF_NUMBERS)
        frame = frame.f_back
    return False


_KINDS = {torch.SymBool: bool, torch.SymInt: int, torch.SymFloat: float}
_TRACERS = "torch", "functorch", "sympy", "graphpasses"
_OF_NUMBERS = "torch.distributions.", "torch.nn.functional"  # their code is called with numbers as the user's is


def _is_users(frame: FrameType) -> bool:
    """Whether a function is not torch's own: that asks for sizes where a graph needs a number."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] != "torch"


def _is_read(value: Any, *, sizes: bool = False) -> bool:
    """Whether a value is a number of a tensor, or follows from one; of ``sizes`` that only running tells, too."""
    if not isinstance(value, (torch.SymFloat, torch.SymInt)):
        return False
    symbols, are_sizes = value.node.expr.free_symbols, value.node.shape_env.size_like
    kinds = SymT.UNBACKED_FLOAT, SymT.UNBACKED_INT
    return bool(symbols) and all(symbol_is_type(each, kinds) and (sizes or each not in are_sizes) for each in symbols)


@contextmanager
def floats_stay_open() -> Iterator[None]:
    """Lets DTensor's caches ask a float that is traced for truth and hash, and decide nothing by that."""

    def truth(number: torch.SymFloat) -> bool:
        return bool(number != 0.0)

    def refuse(number: torch.SymFloat) -> int:
        raise TypeError("a float that is traced has no hash")

    patch: Any = mock.patch.object
    with patch(torch.SymFloat, "__bool__", truth), patch(torch.SymFloat, "__hash__", refuse):
        yield
