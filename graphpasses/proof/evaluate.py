"""Evaluate a graph on numbers of values: what it returns, what it writes, what it sends."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.schemas import is_operator, is_seeded
from graphpasses.analysis.effects import operator_effects
from graphpasses.graph import WAIT, TrainGraph
from graphpasses.graph.nodes import collective_group, freeze, is_collective, memories
from graphpasses.graph.train_graph import OutputKind
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE
from graphpasses.proof import elements, movement
from graphpasses.proof.axioms import RULES
from graphpasses.proof.evaluated import Argument, Collective, Evaluated, Result
from graphpasses.proof.facts import Facts
from graphpasses.proof.values import Geometry, Value, Values, fills_alike, geometry

__all__ = ["evaluate", "origin_of_padding"]

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def evaluate(graph: TrainGraph, values: Values, facts: Facts) -> Evaluated:
    """Evaluates a graph of ATen operators.

    Args:
        graph: the graph.
        values: gives the numbers; two graphs that share it can be compared.
        facts: the fake values of the graph's nodes.
    """
    return _Evaluation(graph, values, facts).run()


@dataclass
class _Memory:
    """What a piece of memory that the graph writes holds.

    Args:
        node: the one whose value fills it.
        geometry: of that value.
        value: what it holds now; None while no one wrote.
    """

    node: fx.Node
    geometry: Geometry | None
    value: Value | None = None


class _Evaluation:
    def __init__(self, graph: TrainGraph, values: Values, facts: Facts) -> None:
        self._graph = graph
        self._table = values
        self._facts = facts
        self._done = Evaluated()
        self._random = self._hidden = 0
        self._waiting: dict[fx.Node, Any] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._memories: dict[fx.Node, _Memory] = {}
        self._inputs: dict[fx.Node, str] = {}
        self._outside: dict[object, dict[fx.Node, None]] = {}

    def run(self) -> Evaluated:
        done, graph = self._done, self._graph
        self._random = self._table.source(("random state",))
        self._hidden = self._table.source(("hidden state",))
        for item, node in zip(graph.inputs, graph.placeholders, strict=True):
            fqn = graph.identity.canonical(item.fqn) if item.is_state else item.fqn
            self._inputs[node] = f"{item.kind.value} {fqn}{f' ({item.attr})' if item.attr else ''}"
        shared: dict[object, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "output":
                break
            source = self._facts.alias[node]
            self._roots[node] = node if source is None else self._roots[source]
            where: object = None
            if node.op in ("placeholder", "get_attr"):
                memory = frozenset(memories(self._facts[node]))
                where = (memory, geometry(self._facts[node])) if memory else None
                for each in memory:
                    self._outside.setdefault(each, {})[node] = None
            elif node.target is operator.getitem and source is None:
                where = node.args  # what one call returns at one place is one memory
            if where is not None:
                self._roots[node] = shared.setdefault(where, node)
            value = self._evaluate(node)
            done.values[node] = value
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Value):
                    done.makers.setdefault(each.number, node)
        done.broken += [(node, f"{node.name} is launched and never waited for") for node in self._waiting]
        self._outputs()
        done.random_state = self._random
        return done

    def _outputs(self) -> None:
        done, graph = self._done, self._graph
        counts: dict[str, int] = {}
        for index, (item, node) in enumerate(zip(graph.outputs, graph.output_values, strict=True)):
            if item.kind is OutputKind.LOSS:
                name = "the loss"
            elif item.kind is OutputKind.GRADIENT and item.is_gradient:
                name = f"the gradient of {graph.identity.canonical(item.fqn)!r}"
                if node is None:
                    continue
            elif item.kind is OutputKind.VALUE:
                name = f"output {index}"
            else:
                continue
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > 1:
                name += f" ({counts[name]})"
            done.outputs[name] = self._read(node) if isinstance(node, fx.Node) else None
            if isinstance(node, fx.Node):
                done.nodes[name] = node
        for root, memory in self._memories.items():
            if root.op in ("placeholder", "get_attr") and memory.value is not None:
                name = self._inputs.get(root, f"the attribute {root.target}")
                done.written[name] = memory.value
                done.nodes[name] = memory.node

    # ---- reading and writing memory -------------------------------------------------------------------------------

    def _read(self, node: fx.Node) -> Result:
        value = self._done.values[node]
        memory = self._memories.get(self._roots[node])
        if memory is None or memory.value is None or not isinstance(value, Value):
            return value
        seen = geometry(self._facts[node])
        if seen == memory.geometry and memory.value.dtype == value.dtype:
            return memory.value
        is_alike = seen and memory.geometry and fills_alike(seen, memory.geometry)
        if is_alike and memory.value.dtype == value.dtype and memory.value.pieces is not None:
            return self._table.moved(value.dtype, seen[0], memory.value.pieces)  # type: ignore[index]
        key = ("part of memory", memory.value.number, memory.geometry, seen, value.dtype)
        return self._opaque(node, self._facts[node], key)

    def _write(self, node: fx.Node, value: Value | None, by: fx.Node) -> None:
        """Notes that an operator writes the memory of a node; what, if the node is all of it."""
        root = self._roots[node]
        for launch in self._waiting:
            if any(self._roots[source] is root for source in launch.all_input_nodes):
                self._done.broken.append(
                    (by, f"{by.name} writes what {launch.name} sends, before anyone has waited for it")
                )
        memory = self._memories.get(root)
        if memory is None:
            memory = self._memories[root] = _Memory(root, geometry(self._facts[root]))
        seen = geometry(self._facts[node])
        old = self._read(root)
        if value is None or not isinstance(old, Value):
            old_number = old.number if isinstance(old, Value) else -1
            value = self._opaque(root, self._facts[root], ("written", self._key(by), old_number, seen))
        elif seen != memory.geometry:
            if seen and memory.geometry and fills_alike(seen, memory.geometry) and value.pieces is not None:
                value = self._table.moved(value.dtype, memory.geometry[0], value.pieces)
            else:
                key = ("written in part", old.number, memory.geometry, seen, value.number)
                value = self._opaque(root, self._facts[root], key)
        memory.value = value
        memory.node = by
        # What else comes from outside in this memory, and lies there otherwise, may have changed, too.
        for each in memories(self._facts[root]):
            for other in map(self._roots.__getitem__, self._outside.get(each, ())):
                if other is not root:
                    held = self._memories.setdefault(other, _Memory(other, geometry(self._facts[other])))
                    beside: Hashable = (
                        "written beside",
                        self._numbers(held.value or self._done.values[other], None),
                        value.number,
                    )
                    held.value = self._opaque(other, self._facts[other], beside)
                    held.node = by

    # ---- one node -------------------------------------------------------------------------------------------------

    def _evaluate(self, node: fx.Node) -> Result:
        fake = self._facts[node]
        if node.op == "placeholder":
            return self._opaque(node, fake, ("input", self._inputs[node]))
        if node.op == "get_attr":
            return self._opaque(node, fake, ("attribute", _attribute(node)))
        if node.target is operator.getitem:
            source, index = node.args
            of = self._done.values[source]  # type: ignore[index]
            if isinstance(of, list) and isinstance(index, int):
                return of[index]
        if is_collective(node):
            return self._launch(node)
        if node.target == WAIT and node.args[0] in self._waiting:
            return self._waiting.pop(node.args[0])  # type: ignore[arg-type]
        effects = operator_effects(node)
        if not effects.writes and effects.group is None and node.target in RULES:
            found = self._moved(node, fake)
            if found is not None:
                return found
        if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE):
            return self._random_state(node, fake)
        key = self._key(node)
        if is_seeded(node.target):
            key = ("drawn", key, self._random)
            self._random = self._table.source(("random state after", key))
        elif effects.has_hidden_state or effects.group is not None:
            key = ("hidden", key, self._hidden)
            self._hidden = self._table.source(("hidden state after", key))
        result = self._opaque(node, fake, key)
        if effects.writes:
            return self._written(node, effects.writes, key, result)
        return result

    def _written(self, node: fx.Node, writes: tuple[fx.Node, ...], key: Hashable, result: Result) -> Result:
        """Evaluates an operator that writes arguments."""
        first = node.args[0] if node.args else None
        if len(writes) == 1 and writes[0] is first and self._facts.alias[node] is not None:
            if node.target == torch.ops.aten.copy_.default and (copied := self._copied(node)) is not None:
                result = copied
            if node.target == torch.ops.aten.add_.Tensor and (total := self._added(node)) is not None:
                result = total
            self._write(first, result, node)
            return result
        for index, each in enumerate(writes):
            written = self._opaque(each, self._facts[each], ("written", index, key))
            self._write(each, written, node)
        return result

    def _copied(self, node: fx.Node) -> Value | None:
        target, source = self._facts[node.args[0]], self._read(node.args[1])  # type: ignore[index, arg-type]
        if not isinstance(source, Value) or source.pieces is None or source.shape != tuple(target.shape):
            return None
        self._done.axioms.add("casts")
        return elements.cast(self._table, source, target.dtype)

    def _added(self, node: fx.Node) -> Value | None:
        if node.kwargs or len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
            return None
        x, y = (self._read(each) for each in node.args)  # type: ignore[arg-type]
        return elements.add(self._table, x, y) if isinstance(x, Value) and isinstance(y, Value) else None

    def _moved(self, node: fx.Node, fake: Any) -> Result:
        name, rule = RULES[node.target]
        if not _is_known(self._facts.geometries[node]):
            return None
        args = _values(node.args, self._read)
        kwargs = _values(node.kwargs, self._read)
        if node.target == torch.ops.aten.constant_pad_nd.default:
            kwargs["origin"] = origin_of_padding(node, self._inputs)
        if any(
            isinstance(each, Value) and each.pieces is None for each in pytree.tree_leaves((args, kwargs))
        ):
            return None
        found = rule(self._table, fake, *args, **kwargs)
        if found is not None:
            self._done.axioms.add(name)
        return found

    def _launch(self, node: fx.Node) -> Value:
        sent = self._read(node.all_input_nodes[0])
        key = (
            "collective",
            str(node.target),
            freeze(_values(node.args, self._number)),
            freeze(_values(node.kwargs, self._number)),
        )
        fake = self._facts[node]
        result: Result = None
        if node.target == ALL_GATHER and isinstance(sent, Value) and geometry(fake) is not None:
            group = str(collective_group(node))
            result = movement.gathered(self._table, sent, int(node.args[1]), group, tuple(fake.shape))  # type: ignore[arg-type]
            if result is not None:
                self._done.axioms.add("all-gather")
        if result is None:
            result = self._opaque(node, fake, key)
        self._waiting[node] = result
        given = tuple(
            each for each in (self._read(x) for x in node.all_input_nodes) if isinstance(each, Value)
        )
        self._done.collectives.append(Collective(node, given, (node.target, str(collective_group(node)))))
        return self._table.other(("launched", key, len(self._done.collectives)))

    def _random_state(self, node: fx.Node, fake: Any) -> Result:
        if node.target == READ_RANDOM_STATE:
            return self._opaque(node, fake, ("state read", self._random))
        state = self._read(node.all_input_nodes[0])
        self._random = self._table.source(("state set", state.number))
        if isinstance(state, Value) and state.pieces is not None and len(state.pieces) == 1:
            key = self._table.key(state.pieces[0].source)
            if key[0] == "state read" and state.pieces[0].offset == 0:
                self._random = key[1]
        return None

    def _key(self, node: fx.Node) -> Hashable:
        """Returns what an operator's results depend on: its arguments' values and strides."""
        args = freeze(_values(node.args, self._argument))
        kwargs = freeze(_values(node.kwargs, self._argument))
        return ("call", _name(node.target), args, kwargs)

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

    def _opaque(self, node: fx.Node, fake: Any, key: Hashable, part: int | None = None) -> Result:
        if isinstance(fake, (list, tuple)):
            return [self._opaque(node, each, key, index) for index, each in enumerate(fake)]
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


def _is_known(seen: Any) -> bool:
    """Whether shapes and strides do not depend on data."""
    return seen is not None and None not in seen


def origin_of_padding(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str | None:
    """Returns the input of which a padded tensor is a part: other ranks' parts may be larger.

    Args:
        node: the call that pads.
        inputs: by their placeholders.
    """
    while node not in inputs:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.target not in RULES:
            return None
        node = node.all_input_nodes[0]
    return inputs[node]


@functools.cache
def _name(target: Any) -> Hashable:
    """Returns an operator's name; one that computes in place has that of its twin."""
    if not is_operator(target):
        return id(target), str(target)
    name = str(target)
    twin = name.replace("_.", ".", 1)
    return twin if twin != name and not name.split(".")[1].startswith("_") else name


def _values(args: Any, read: Any) -> Any:
    if isinstance(args, fx.Node):
        return read(args)
    if isinstance(args, (list, tuple)):
        return [_values(each, read) for each in args]
    if isinstance(args, dict):
        return {name: _values(each, read) for name, each in args.items()}
    if isinstance(args, slice):
        return slice(*_values([args.start, args.stop, args.step], read))
    return args


def _attribute(node: fx.Node) -> Hashable:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return str(value.code) if isinstance(value, fx.GraphModule) else id(value)
