"""Graph diffs: what a pass changed in a graph, for people to read."""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from graphpasses._torch.operator_facts import kind_of
from graphpasses.analysis.levels import grouped
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
    kept = _kept(before, after)
    staying = {before[index].node for index, _ in kept}
    texts = [{line.node: line.text for line in lines} for lines in (before, after)]
    sides = []
    for lines, mark, other in ((before, "-", texts[1]), (after, "+", texts[0])):
        marks = [
            " " if line.node in staying else "~" if other.get(line.node) == line.text else mark for line in lines
        ]
        sides.append(_Side(lines, marks))
    places = _places(kept, len(before), len(after))
    patterns = grouped(places, key=lambda place: tuple(map(_Side.signature, sides, place)))
    before_side, after_side = sides
    found = (
        Hunk(before_side.show(first[0]), after_side.show(first[1]), 1 + len(others))
        for first, *others in patterns[:_MAX_HUNKS]
    )
    return tuple(found), sum(map(len, patterns[_MAX_HUNKS:]))


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
        """Returns the lines of a place and some around them; of very many the first and the last."""
        around = slice(max(0, place.start - _CONTEXT), place.stop + _CONTEXT)
        shown = [
            f"{mark} {line.text[:_MAX_CHARS]}{'…' * (len(line.text) > _MAX_CHARS)}"
            for mark, line in zip(self.marks[around], self.lines[around], strict=True)
        ]
        if len(shown) > _MAX_LINES:
            half = _MAX_LINES // 2
            shown[half:-half] = [f"… {len(shown) - 2 * half} more lines"]
        return tuple(shown)


def _places(kept: Sequence[tuple[int, int]], num_before: int, num_after: int) -> list[tuple[slice, slice]]:
    """Returns where lines changed, before and after; places with few lines between them that stayed are one."""
    changed: list[tuple[slice, slice]] = []
    for (i, j), (next_i, next_j) in itertools.pairwise([(-1, -1), *kept, (num_before, num_after)]):
        if next_i - i == 1 and next_j - j == 1:
            continue
        start_before, start_after = i + 1, j + 1
        if changed and start_before - changed[-1][0].stop <= 2 * _CONTEXT:
            start_before, start_after = (side.start for side in changed.pop())
        changed.append((slice(start_before, next_i), slice(start_after, next_j)))
    return changed


def _kept(before: Sequence[Line], after: Sequence[Line]) -> list[tuple[int, int]]:
    """Returns the indices of lines that stayed: a longest common subsequence, each line being one of its kind."""
    index_of = {line.node: index for index, line in enumerate(before)}
    common = [
        (i, j)
        for j, line in enumerate(after)
        if (i := index_of.get(line.node)) is not None and before[i].text == line.text
    ]
    # The longest ascending subsequence, by patience sorting: ends[n] is the last of the best one of length n + 1.
    ends: list[int] = []
    pairs: list[int] = []
    previous: list[int] = []
    for index, (i, _) in enumerate(common):
        length = bisect.bisect_left(ends, i)
        previous.append(pairs[length - 1] if length else -1)
        ends[length : length + 1] = [i]
        pairs[length : length + 1] = [index]
    kept, index = [], pairs[-1] if pairs else -1
    while index >= 0:
        kept.append(common[index])
        index = previous[index]
    return kept[::-1]


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
