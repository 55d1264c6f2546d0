"""What memory holds while a graph is evaluated: which nodes share it, and what writes leave there."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from graphpasses._torch.schemas import is_operator, schemas
from graphpasses.fbgemm.names import BOUNDS_CHECK
from graphpasses.graph import TrainGraph
from graphpasses.graph.nodes import freeze, memories
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.proof import elements
from graphpasses.proof.evaluated import Argument, Evaluated, Result
from graphpasses.proof.facts import Facts
from graphpasses.proof.values import Geometry, Value, Values, fills_alike, geometry


@dataclass
class _Held:
    """What a piece of memory that the graph writes holds."""

    node: fx.Node  # the one whose value fills it
    geometry: Geometry | None  # of that value
    value: Value | None = None  # what it holds now; None while no one wrote


class Memory:
    """The values of a graph's nodes as far as they are known, and the memory in which they lie."""

    def __init__(self, graph: TrainGraph, values: Values, facts: Facts) -> None:
        self._graph = graph
        self._table = values
        self._facts = facts
        self._done = Evaluated()
        self._waiting: dict[fx.Node, Any] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._held: dict[fx.Node, _Held] = {}
        self._outside: dict[object, dict[fx.Node, None]] = {}
        self._shared: dict[object, fx.Node] = {}
        self._counts: dict[int, int] = {}
        self._freed: dict[fx.Node, fx.Node] = {}

    def _place(self, node: fx.Node) -> None:
        """Notes in which memory the value of a node lies."""
        source = self._facts.alias[node]
        self._roots[node] = node if source is None else self._roots[source]
        where: object = None
        if node.op in ("placeholder", "get_attr"):
            memory = frozenset(memories(self._facts[node]))
            where = (memory, geometry(self._facts[node])) if memory else None
            for each in memory:
                self._outside.setdefault(each, {})[node] = None
        elif node.target is operator.getitem and source is None and isinstance(node.args[1], int):
            where = node.args  # what one call returns at one place is one memory
        if where is not None:
            self._roots[node] = self._shared.setdefault(where, node)

    def _look_for_freed(self, node: fx.Node) -> None:
        """Notes if an operator reads memory that another has freed; a view reads none."""
        for source in node.all_input_nodes if self._freed else ():
            by = self._freed.get(self._roots[source])
            if by is not None and self._roots.get(node) is not self._roots[source]:
                self._done.broken.append((by, f"{by.name} frees {source.name}, which {node.name} reads"))

    def _read(self, node: fx.Node) -> Result:
        value = self._done.values[node]
        memory = self._held.get(self._roots[node])
        if memory is None or memory.value is None or not isinstance(value, Value):
            return value
        seen = geometry(self._facts[node])
        if seen == memory.geometry and memory.value.dtype == value.dtype:
            return memory.value
        is_alike = seen and memory.geometry and fills_alike(seen, memory.geometry)
        if is_alike and memory.value.dtype == value.dtype and memory.value.pieces is not None:
            return self._table.moved(value.dtype, seen[0], memory.value.pieces)  # type: ignore[index]
        key = ("part of memory", memory.value.number, memory.geometry, seen, value.dtype)
        return self.opaque(node, self._facts[node], key)

    def _write(self, node: fx.Node, value: Value | None, by: fx.Node) -> None:
        """Notes that an operator writes the memory of a node; what, if the node is all of it."""
        root = self._roots[node]
        for launch in self._waiting:
            if any(self._roots[source] is root for source in launch.all_input_nodes):
                self._done.broken.append(
                    (by, f"{by.name} writes what {launch.name} sends, before anyone has waited for it")
                )
        memory = self._held.get(root)
        if memory is None:
            memory = self._held[root] = _Held(root, geometry(self._facts[root]))
        seen = geometry(self._facts[node])
        old = self._read(root)
        if value is None or not isinstance(old, Value):
            old_number = old.number if isinstance(old, Value) else -1
            value = self.opaque(root, self._facts[root], ("written", (old_number, seen), self._key(by)))
        elif seen != memory.geometry:
            if seen and memory.geometry and fills_alike(seen, memory.geometry) and value.pieces is not None:
                value = self._table.moved(value.dtype, memory.geometry[0], value.pieces)
            else:
                key = ("written in part", old.number, memory.geometry, seen, value.number)
                value = self.opaque(root, self._facts[root], key)
        memory.value = value
        memory.node = by
        # What else comes from outside in this memory, and lies there otherwise, may have changed, too.
        for each in memories(self._facts[root]):
            for other in map(self._roots.__getitem__, self._outside.get(each, ())):
                if other is not root:
                    held = self._held.setdefault(other, _Held(other, geometry(self._facts[other])))
                    beside: Hashable = (
                        "written beside",
                        self._numbers(held.value or self._done.values[other], None),
                        value.number,
                    )
                    held.value = self.opaque(other, self._facts[other], beside)
                    held.node = by

    def _copied(self, node: fx.Node) -> Value | None:
        target, source = self._facts[node.args[0]], self._read(node.args[1])  # type: ignore[index, arg-type]
        if not isinstance(source, Value):
            return None
        if source.pieces is None:  # its sizes depend on data
            given = self._facts[node.args[1]]  # type: ignore[index]
            alike = source.dtype == target.dtype and statically_known_true(sym_eq(given.shape, target.shape))
            return source if alike else None
        if source.shape != tuple(target.shape):
            return None
        self._done.axioms.add("casts")
        return elements.cast(self._table, source, target.dtype)

    def _added(self, node: fx.Node) -> Value | None:
        if node.kwargs or len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
            return None
        x, y = (self._read(each) for each in node.args)  # type: ignore[arg-type]
        return elements.add(self._table, x, y) if isinstance(x, Value) and isinstance(y, Value) else None

    # ---- numbers --------------------------------------------------------------------------------------------------

    def _key(self, node: fx.Node) -> tuple[Hashable, ...]:
        """Returns what an operator's results depend on: its arguments' values and strides."""
        return self._call(node.target, node.args, node.kwargs)

    def _call(self, target: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
        args, kwargs = evaluated((args, kwargs), self._argument)
        if str(target) == BOUNDS_CHECK:  # no check reads the count of bad ids
            place = warning_of(target)
            args[place] = Argument(self._counts.get(args[place].number, args[place].number), None)
        return ("call", _name(target), freeze(args), freeze(kwargs))

    def _argument(self, node: fx.Node) -> Hashable:
        return self._numbers(self._read(node), self._facts.geometries[node])

    def _number(self, node: fx.Node) -> Hashable:
        return self._numbers(self._read(node), None)

    def _numbers(self, value: Result, seen: Any) -> Hashable:
        if isinstance(value, list):
            return tuple(
                self._numbers(each, None if seen is None else seen[index]) for index, each in enumerate(value)
            )
        return Argument(value.number, seen and seen[1]) if isinstance(value, Value) else None

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


def warning_of(check: Any) -> int:
    """Returns which argument of a bounds check is the count of bad ids, which it overwrites or leaves."""
    (schema,) = schemas(check)
    return [argument.name for argument in schema.arguments].index("warning")


@functools.cache
def _name(target: Any) -> Hashable:
    """Returns an operator's name, without the mark of computing in place. Functions may have one name."""
    if isinstance(target, str):
        return target
    if not is_operator(target):
        module = getattr(target, "__module__", None) or "torch"
        return f"{module}.{getattr(target, '__name__', target)}", id(target)
    name = str(target)
    plain = name.replace("_.", ".", 1)
    return plain if plain != name and not name.split(".")[1].startswith("_") else name


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
