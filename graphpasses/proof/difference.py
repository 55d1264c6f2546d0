"""Find the smallest part in which two graphs compute a value differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpasses.fbgemm.names import BOUNDS_CHECK, FBGEMM
from graphpasses.graph.nodes import source_line
from graphpasses.proof.core.values import Argument, Value, Values
from graphpasses.proof.core.views import Layout
from graphpasses.proof.evaluated import Evaluated
from graphpasses.proof.terms import KINDS, Term

# What passes make of other calls, or what a user's do, may have the same bits for reasons that no rule knows.
_FOLLOWED = (
    "aten.", "_c10d_functional.", "prims.", "torch.", "_operator.", f"{FBGEMM}.split_embedding",
    "graphpasses.pack_all_to_all.", "graphpasses.unpack_all_to_all.", "graphpasses.pack_bags.",
)  # fmt: skip
_ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"


@dataclass(frozen=True)
class Difference:
    """Where two graphs first differ."""

    before: fx.Node | None  # what computes the value in the first graph; None if nothing there does
    after: fx.Node | None  # what computes it in the second
    reason: str  # how they differ
    unknown: str = ""  # what no rule looks into, so that both may still have the same bits; else empty
    shown: str = ""  # what running both has shown; empty where they were not run

    def __str__(self) -> str:
        places = f"  before: {place_of(self.before)}\n  after:  {place_of(self.after)}"
        return f"{self.reason}\n{places}" + (f"\n  {self.shown}" if self.shown else "")


def place_of(node: fx.Node | None) -> str:
    """Returns a node as code, with the line of the user's program from which it comes."""
    if node is None:
        return "no node has this value"
    if node.op != "call_function":
        return f"{node.name}, a {node.op}"
    given = [_short(each) for each in node.args]
    given += [f"{name}={_short(each)}" for name, each in node.kwargs.items()]
    line = source_line(node)
    return f"{node.name} = {node.target}({', '.join(given)}){f'  # {line}' if line else ''}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:60]} …"


def find_difference(values: Values, before: Evaluated, after: Evaluated, one: Value, two: Value) -> Difference:
    """Follows two different values to their inputs, as long as the same operators made them."""
    nodes: tuple[fx.Node | None, fx.Node | None] = (None, None)
    while True:
        nodes = before.makers.get(one.number) or nodes[0], after.makers.get(two.number) or nodes[1]
        found = _parts(values, one, two)
        if isinstance(found, _Sources):
            made = before.made.get(found.one), after.made.get(found.two)
            nodes = made[0] or nodes[0], made[1] or nodes[1]
            both_have = found.one in after.made and found.two in before.made
            found = _made_of(values, found)
            is_count = isinstance(found, _Leaf) and found.unknown == BOUNDS_CHECK
            if isinstance(found, _Leaf) and both_have and not is_count:  # neither replaces the other
                found = _Leaf(found.reason)
        if isinstance(found, _Leaf):
            by_data = any(each.dtype is not None and each.shape is None for each in (one, two))
            return Difference(*nodes, found.reason, found.unknown or "sizes that depend on data" * by_data)
        one, two = found


def are_drawn_alike(values: Values, one: int, two: int) -> bool:
    """Whether the same operators drew random numbers in one order, if perhaps for other values."""
    while one != two:
        a, b = values.key(one), values.key(two)
        if a[0] == b[0] == "state set" and len(a) == len(b) == 4:  # of one generator of several, to what it was
            one, two = a[3], b[3]
            continue
        if not a[0] == b[0] == "random state after" or _without_values(a[1][1]) != _without_values(b[1][1]):
            return False
        one, two = a[1][2], b[1][2]
    return True


def _without_values(key: Any) -> Any:
    """Returns what a call depends on beside the values of its tensors."""
    if isinstance(key, Argument):
        return key.layout
    return tuple(map(_without_values, key)) if isinstance(key, tuple) else key


@dataclass(frozen=True)
class _Leaf:
    reason: str
    unknown: str = ""


@dataclass(frozen=True)
class _Sources:
    one: int
    two: int


def _parts(values: Values, one: Value, two: Value) -> _Leaf | _Sources | tuple[Value, Value]:
    """Returns the first sources, or summands, in which two tensors differ; or what else differs."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return _Leaf(f"{_kind(one)} became {_kind(two)}")
    if one.rows is not None and two.rows is not None and one.rows[0] == two.rows[0]:
        return values[one.rows[1]], values[two.rows[1]]
    if one.pieces is None or two.pieces is None:
        if one.source is None or two.source is None:
            return _Leaf("a value became one of another kind")
        return _sources(values, one.source, two.source)
    for a, b in zip(one.pieces, two.pieces, strict=False):
        if a.source != b.source:
            return _sources(values, a.source, b.source)
        if a != b:
            return _Leaf(f"elements of {_operator(values, a.source)} stand in other places")
    return _Leaf("elements are missing or were added")


def _sources(values: Values, one: int, two: int) -> _Leaf | _Sources | tuple[Value, Value]:
    a, b = values.key(one), values.key(two)
    while isinstance(a, Term) and isinstance(b, Term) and a != b:
        if a.kind == b.kind == "tensor":
            return values[a.parameters[0]], values[b.parameters[0]]
        if a._replace(operands=()) != b._replace(operands=()):
            break
        one, two = _apart(a.operands, b.operands)
        a, b = values.key(one), values.key(two)
    return _Sources(one, two)


def _apart(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    """Returns the first operands, of two that may be exchanged, that are not operands of both."""
    return next(each for each in a if each not in b or a[0] == a[1]), next(
        each for each in b if each not in a or b[0] == b[1]
    )


def _made_of(values: Values, sources: _Sources) -> _Leaf | tuple[Value, Value]:
    """Returns the inputs in which two results differ; or how their operators differ."""
    a, b = values.key(sources.one), values.key(sources.two)
    if a[0] == b[0] == "row":
        return _made_of(values, _Sources(a[1], b[1]))
    if a[0] == b[0] == "result" and a[2:] == b[2:]:
        return _keys(values, a[1], b[1])
    one, two = (_operator(values, each) for each in (sources.one, sources.two))
    reason = f"{one} became {two}" if one != two else f"{one} is another"
    return _Leaf(reason, _unknown(*(key[1] for key in (a, b) if key[0] == "result")))


def _keys(values: Values, a: Any, b: Any) -> _Leaf | tuple[Value, Value]:
    """Compares what two results of operators were made from."""
    if a[0] in ("drawn", "hidden") and a[0] == b[0]:
        if a[1] != b[1]:
            return _keys(values, a[1], b[1])
        what = "random numbers were drawn" if a[0] == "drawn" else "calls with a state of their own were made"
        return _Leaf(f"before {called(a[1])} other {what}", _unknown(a, b))
    if a[0] == b[0] == "written" and a[1] == b[1]:
        return _keys(values, a[2], b[2])
    if a[0] == b[0] and a[0] in ("call", "collective") and a[1] == b[1]:
        if a[1] == _ALL_TO_ALL and a[2][1:] != b[2][1:]:  # what ranks send may be cut otherwise
            return _Leaf(f"{called(a)} is given {_plain(b[2][1:])} instead of {_plain(a[2][1:])}", a[1])
        if a[2] == b[2] and _turn(a) != _turn(b):
            return _Leaf(f"{called(a)} is another, in which this rank sends the same, and others perhaps do not")
        x, y = _first_unlike(a[2:], b[2:])
        if isinstance(x, Argument) and isinstance(y, Argument):
            if x.number != y.number:
                return values[x.number], values[y.number]
            return _Leaf(f"{called(a)} reads a tensor {_layouts(x.layout, y.layout)}", _unknown(a, b))
        return _Leaf(f"{called(a)} is given {_plain(y)} instead of {_plain(x)}", _unknown(a, b))
    return _Leaf(f"{called(a)} became {called(b)}", _unknown(a, b))


def _turn(key: Any) -> list[Any]:
    """Returns which one a launch is of those in which this rank sends the same, as it stands among keywords."""
    keywords = key[3] if len(key) > 3 and isinstance(key[3], tuple) else ()
    return [each for each in keywords if isinstance(each, tuple) and each[:1] == ("turn",)]


def _first_unlike(a: Any, b: Any) -> tuple[Any, Any]:
    is_number = isinstance(a, tuple) and a[:1] in ((float,), (complex,))  # as it is frozen
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and not is_number:
        for x, y in zip(a, b, strict=True):
            if x != y:
                return _first_unlike(x, y)
    return a, b


def _operator(values: Values, source: int) -> str:
    """Returns what people call a source."""
    key = values.key(source)
    if isinstance(key, Term):
        return KINDS[key.kind].words.format(*key.parameters)
    match key[0]:
        case "row":
            return _operator(values, key[1])
        case "result":
            return called(key[1])
        case "constant":
            return f"the constant {key[2]}"
        case "padding":
            return f"the padding of {key[1]}"
    return str(key[0])


def called(key: Any) -> str:
    """Returns what people call a call, from what its results depend on."""
    match key[0]:
        case "call" | "collective" | "input":
            return str(key[1] if isinstance(key[1], str) else key[1][0])
        case "drawn" | "hidden":
            return called(key[1])
        case "written":
            return f"what {called(key[2])} writes"
        case "part of memory" | "written in part":
            return "a part of memory that is written"
    return str(key[0])


def _unknown(*keys: Any) -> str:
    """Returns the first operator among keys that no rule looks into."""
    kinds = {key[0] for key in keys}
    if len(kinds) > 1 and kinds <= {"written", "written in part", "part of memory"}:
        return "writes to parts of memory"
    for key in keys:
        while key[0] in ("drawn", "hidden", "written"):
            key = key[2 if key[0] == "written" else 1]
        name = called(key)
        is_followed = name.startswith(_FOLLOWED) and not name.startswith("torch.ops.")
        if key[0] == "call" and not is_followed and "." in name:  # else a method
            return name
    return ""


def _kind(value: Value) -> str:
    return "a value" if value.dtype is None else f"a tensor of {value.dtype} and shape {value.shape}"


def _layouts(one: Layout | None, two: Layout | None) -> str:
    if one is None or two is None:
        return "of another kind"
    if one.strides != two.strides:
        return f"of strides {two.strides} instead of {one.strides}"
    if one.device != two.device:
        return f"on {two.device} instead of {one.device}"
    return "that begins elsewhere in its memory"


def _plain(key: Any) -> str:
    if isinstance(key, Argument):
        return "a value"
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type):
        parts = key[1] if key[0] is complex else (key[1],)
        return str(key[0](*map(float.fromhex, parts))) if key[0] in (float, complex) else _plain(key[1])
    if isinstance(key, tuple):
        return f"({', '.join(map(_plain, key[:4]))}{', …' if len(key) > 4 else ''})"
    return str(key)
