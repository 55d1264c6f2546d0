"""Graph diffs: what a pass changed in a graph, for people to read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from graphpasses._torch.operator_facts import kind_of
from graphpasses.graph import TrainGraph
from graphpasses.graph.pass_report import Hunk

_CONTEXT = 2  # unchanged lines around a change
_MAX_LINES = 40  # of one side of a hunk
_MAX_CHARS = 160
_MAX_HUNKS = 30


@dataclass(frozen=True)
class Line:
    """A node as it was when it was read."""

    node: fx.Node  # the node, which tells it from others of the same text
    text: str  # what it computes, from what, and its dtype and shape
    operator: str  # its operator alone, which is the same in all layers of a model


def read_lines(graph: TrainGraph) -> list[Line]:
    """Reads a step's graph as text, one line per node."""
    names = {node: item.fqn for node, item in zip(graph.placeholders, graph.inputs, strict=True)}
    return [Line(node, _text(node, names), _operator(node)) for node in graph.graph.nodes]


def diff_lines(before: Sequence[Line], after: Sequence[Line]) -> tuple[tuple[Hunk, ...], int]:
    """Returns the places where a graph changed, in order, those that look alike as one; and how many are left out."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    staying = {line for block in matcher.get_matching_blocks() for line in before[block.a : block.a + block.size]}
    sides = []
    for lines, others, mark in ((before, set(after), "-"), (after, set(before), "+")):
        marks = [" " if line in staying else "~" if line in others else mark for line in lines]
        sides.append(_Side(lines, marks))
    places_of: dict[object, list[tuple[slice, slice]]] = {}
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        place = slice(first[1], last[2]), slice(first[3], last[4])
        places_of.setdefault(tuple(map(_Side.signature, sides, place)), []).append(place)
    patterns = list(places_of.values())
    hunks = []
    for places in patterns[:_MAX_HUNKS]:
        lines_before, lines_after = map(_Side.show, sides, places[0])
        hunks.append(Hunk(lines_before, lines_after, len(places)))
    return tuple(hunks), sum(map(len, patterns[_MAX_HUNKS:]))


@dataclass(frozen=True)
class _Side:
    """A graph before or after a pass, and each line's mark."""

    lines: Sequence[Line]
    marks: Sequence[str]

    def signature(self, place: slice) -> object:
        """Returns what is equal for places that look the same."""
        marked = zip(self.marks[place], self.lines[place], strict=True)
        return tuple((mark, line.operator) for mark, line in marked if mark != " ")

    def show(self, place: slice) -> tuple[str, ...]:
        """Returns the lines of a place; of very many the first and the last."""
        shown = [
            f"{mark} {line.text[:_MAX_CHARS]}{'…' * (len(line.text) > _MAX_CHARS)}"
            for mark, line in zip(self.marks[place], self.lines[place], strict=True)
        ]
        if len(shown) > _MAX_LINES:
            half = _MAX_LINES // 2
            shown[half:-half] = [f"… {len(shown) - 2 * half} more lines"]
        return tuple(shown)


def _text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "output":
        return f"return {node.args[0]!r}"
    text = f"{node.name} = {_operator(node)}"
    if node.op not in ("placeholder", "get_attr"):
        arguments = [*map(repr, node.args), *(f"{name}={value!r}" for name, value in node.kwargs.items())]
        text += f"({', '.join(arguments)})"
    facts = [_shape(node.meta.get("val"))]
    facts += [f"of {names[each]}" for each in (node, *node.all_input_nodes) if names.get(each)]
    said = ", ".join(filter(None, facts))
    return f"{text}  # {said}" if said else text


def _operator(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.op
    if isinstance(node.target, str):
        return node.target
    # An operator's own text is its short name, a function's is its address.
    return node.target.__name__ if inspect.isroutine(node.target) else str(node.target)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return kind_of(value)
    if isinstance(value, tuple | list) and value and all(isinstance(each, Tensor) for each in value):
        return f"{len(value)} tensors, the first {_shape(value[0])}"
    return ""
