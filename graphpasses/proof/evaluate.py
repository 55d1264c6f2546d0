"""Evaluate a graph on numbers of values: what it returns, what it writes, what it sends."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.auto_functionalized import FunctionalizedCall, WrittenView, read_functionalized_call
from graphpasses._torch.schemas import bind_named, draws, given_arguments, is_seeded
from graphpasses.analysis.effects import (
    Effects,
    is_elementwise_on_lists,
    names_written,
    operator_effects,
)
from graphpasses.fbgemm.names import BOUNDS_CHECK, TRACED_LOOKUP
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument
from graphpasses.graph.constants import read_constants
from graphpasses.graph.nodes import METADATA_OPS, collective_group, freeze, is_collective
from graphpasses.graph.train_graph import InputKind, OutputKind
from graphpasses.ops.pack_all_to_all import PACK, UNPACK
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.proof import movement
from graphpasses.proof.axioms import RULES
from graphpasses.proof.evaluated import Collective, Evaluated, Result
from graphpasses.proof.exchanges import AXIOM as EXCHANGED
from graphpasses.proof.exchanges import Exchanges
from graphpasses.proof.facts import Facts, Place, leaves
from graphpasses.proof.memory import Held, Memory, evaluated, warning_of
from graphpasses.proof.operators import out_of_place
from graphpasses.proof.values import Value, Values, geometry

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
# By name: torch has these operators where its module of them was imported.
OFFLOADING = frozenset({"ao.offload.default", "ao.reload.default", "ao.wait_tensor.default"})


def evaluate(
    graph: TrainGraph,
    values: Values,
    facts: Facts,
    given: Mapping[str, Result] | None = None,
    constants: Mapping[str, Hashable] | None = None,
) -> Evaluated:
    """Evaluates a graph of ATen operators.

    Two graphs that share ``values`` can be compared. ``given`` has the values of gradients that are inputs, by FQN;
    ``constants`` say what constants held before a pass could write them.
    """
    return Evaluation(graph, values, facts, given, constants).run()


class Evaluation(Memory):
    """Evaluates a graph of ATen operators, node by node; see :func:`evaluate`."""

    def __init__(
        self,
        graph: TrainGraph,
        values: Values,
        facts: Facts,
        given: Mapping[str, Result] | None = None,
        constants: Mapping[str, Hashable] | None = None,
    ) -> None:
        super().__init__(graph, values, facts)
        self._constants = {**read_constants(graph.graph), **(constants or {})}
        self._given = given or {}
        self._random = values.source(("random state",))
        self._hidden = values.source(("hidden state",))
        self._inputs: dict[fx.Node, str] = {}
        self._exchanges = Exchanges(facts)
        self._brought: dict[fx.Node, Result] = {}

    def run(self) -> Evaluated:
        """Returns what the graph does."""
        done, graph = self._done, self._graph
        for item, node in zip(graph.inputs, graph.placeholders, strict=True):
            fqn = graph.identity.canonical(item.fqn) if item.is_state else item.fqn
            state = f" {item.state}" if item.state else ""
            self._inputs[node] = f"{item.kind.value} {fqn}{state}{f' ({item.attr})' if item.attr else ''}"
            if item.kind is InputKind.GRADIENT:
                self._done.values[node] = self._given[fqn]
        for node in graph.graph.nodes:
            self._look_for_freed(node)
            if node.op == "output":
                break
            value = self.evaluate_node(node)
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
            if item.is_loss:
                name = "the loss"
            elif item.is_gradient:
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
        for (root, _), memory in self._held.items():
            if root.op in ("placeholder", "get_attr") and memory.value is not None:
                name = self._inputs.get(root, f"the attribute {root.target}")
                done.written[name] = memory.value
                done.nodes[name] = memory.node

    # ---- one node -------------------------------------------------------------------------------------------------

    def evaluate_node(self, node: fx.Node) -> Result:
        """Returns the value of a node, after those before it."""
        fake = self._facts[node]
        if node.op == "placeholder":
            given = self._done.values.get(node)
            return self.opaque(node, fake, ("input", self._inputs[node])) if given is None else given
        if node.op == "get_attr":
            return self._constant(node, fake)
        if node.target is operator.getitem:
            source, index = node.args
            of = self._done.values[source]  # type: ignore[index]
            if isinstance(of, list) and isinstance(index, int):
                return of[index]  # what its memory holds since is read where this is
        if is_collective(node):
            return self._launch(node)
        if node.target == WAIT and node.args[0] in self._waiting:
            return self._waiting.pop(node.args[0])  # type: ignore[arg-type]
        if node.target == UNPACK and (unpacked := self._unpacked(node, fake)) is not None:
            return unpacked
        if node.target in METADATA_OPS:
            return self._size(node, fake)
        if str(node.target) in OFFLOADING:
            return self._offloaded(node)
        effects = operator_effects(node)
        if not effects.writes and effects.group is None and node.target in RULES:
            found = self._moved(node, fake, node.target)
            if found is not None:
                return found
        if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE):
            return self._random_state(node, fake)
        call = read_functionalized_call(node)
        if call is not None and all(
            isinstance(each, WrittenView) and each.view is None for each in _views(call)
        ):
            return self._functionalized(node, call)
        if is_elementwise_on_lists(node.target) and not self._overlaps(node, names_written(node)):
            return self._each(node, fake)
        key: Hashable = self._key(node)
        if overlaps := self._overlaps(node, names_written(node)) if effects.writes else ():
            key = (*key, "overlapping", overlaps)  # type: ignore[misc]
        key = self._after_others(draws(node), self._has_state(node, effects), key)
        result = self.opaque(node, fake, key)
        if node.target == PACK and isinstance(result, Value):
            inputs, splits = node.args
            numbers = evaluated(inputs, self._number), evaluated(splits, self._number)
            self._exchanges.pack(result.number, node, *numbers)
        if effects.writes:
            return self._written(node, effects.writes, key, result)
        return result

    def _constant(self, node: fx.Node, fake: Any) -> Result:
        """Returns what a constant holds; another that lies in its memory may have been written."""
        value = self.opaque(node, fake, ("attribute", self._constants[str(node.target)]))
        places = self._facts.places[node]
        for root in self._beside((node, None)) if places[0] is not None else ():
            held = self._held.get(root)
            if held is not None and held.value is not None and isinstance(value, Value):
                key = ("written beside", self._numbers(value, None), held.value.number)
                written: Any = self.opaque(node, fake, key)
                self._held[node, None] = Held(node, places[0].view, written)
        return value

    def _has_state(self, node: fx.Node, effects: Effects) -> bool:
        """Whether what a call returns may follow from more than its arguments."""
        return effects.has_hidden_state and not _is_function(node.target)

    def _offloaded(self, node: fx.Node) -> Result:
        """Returns the value of an activation that is moved to the CPU or back; the wait frees its old memory."""
        self._done.axioms.add(movement.OFFLOADED)
        copied, *others = node.all_input_nodes
        value = self._read(copied)
        freed = node.args[1] if len(node.args) > 1 else node.kwargs.get("keepalive")
        if isinstance(freed, fx.Node) and freed in others:
            self._freed.update(dict.fromkeys(self._roots(freed), node))
        return value

    def _size(self, node: fx.Node, fake: Any) -> Result:
        """Returns the value of a size; what a collective brings has one as soon as it is launched."""
        of, *dim = node.args
        value = self._brought[of] if of in self._brought else self._read(of)  # type: ignore[index, arg-type]
        given = self._numbers(value, self._facts.layout(of))  # type: ignore[arg-type]
        key = (fake,) if type(fake) is int else (str(node.target), given, *dim)
        return self.opaque(node, fake, ("size", *key))

    def _after_others(self, is_drawn: bool, has_hidden_state: bool, key: Hashable) -> Hashable:
        """Returns what a call depends on that may draw random numbers, or have a state of its own."""
        if is_drawn:
            key = ("drawn", key, self._random)
            self._random = self._table.source(("random state after", key))
        elif has_hidden_state:
            key = ("hidden", key, self._hidden)
            self._hidden = self._table.source(("hidden state after", key))
        return key

    def _functionalized(self, node: fx.Node, call: FunctionalizedCall) -> list[Any]:
        """Evaluates a call that writes copies as the one that writes in place; it returns the copies, too."""
        written = [view.base for view in _views(call)]
        values = {name: _written_bases(view, call.bases) for name, view in call.writes.items()}
        args, kwargs = bind_named(call.op, {**call.reads, **values})
        key = self._after_others(
            is_seeded(call.op), not _is_function(call.op), self._call(call.op, args, kwargs)
        )
        fakes = list(self._facts[node])
        results = [
            self.opaque(node, fake, key, index if call.num_results > 1 else None)
            for index, fake in enumerate(fakes[: call.num_results])
        ]
        for index, fake in enumerate(fakes[call.num_results :]):
            number = max(place for place, base in enumerate(written) if base == index)
            results.append(self.opaque(node, fake, ("written", number, key)))
        if str(call.op) == BOUNDS_CHECK:
            count = args[warning_of(call.op)]
            self._note_count(self._read(count), results[call.num_results + call.bases.index(count)])
        return results

    def _written(self, node: fx.Node, writes: tuple[fx.Node, ...], key: Hashable, result: Result) -> Result:
        """Evaluates an operator that writes arguments."""
        first = node.args[0] if node.args else None
        fake = self._facts[node]
        is_first = len(writes) == 1 and writes[0] is first
        if is_first and self._roots(node) == self._roots(first) and isinstance(result, Value):  # type: ignore[arg-type]
            if "overlapping" not in _parts_of(key):
                if node.target == torch.ops.aten.copy_.default:
                    result = result if (copied := self._copied(node)) is None else copied
                elif (moved := self._moved(node, fake, out_of_place(node.target))) is not None:
                    result = moved
            self._write(first, result, node)  # type: ignore[arg-type]
            return result
        for index, each in enumerate(writes):
            written = self.opaque(each, self._facts[each], ("written", index, key))
            if str(node.target) == BOUNDS_CHECK and each is node.args[warning_of(node.target)]:
                self._note_count(self._read(each), written)
            self._write(each, written, node)
        return result

    def _each(self, node: fx.Node, fakes: Any) -> list[Any]:
        """Evaluates an operator on lists of tensors: on each element as if that were alone."""
        self._done.axioms.add("lists")
        results: list[Any] = []
        written = names_written(node)
        args, kwargs = evaluated((node.args, node.kwargs), lambda each: self._argument(each, node.target))
        targets = [
            [leaf for each in value for leaf in self._leaves(each)]
            if isinstance(value, (list, tuple))
            else self._leaves(value)
            for argument, value in given_arguments(node)
            if argument.name in written
        ]
        names = [argument.name for argument, _ in given_arguments(node) if argument.name in written]
        length = max(len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
        for index in range(length):

            def element(value: Any, index: int = index) -> Any:
                return value[index] if isinstance(value, (list, tuple)) and value else value

            key = self._call_of(
                node.target, [*map(element, args)], {name: element(value) for name, value in kwargs.items()}
            )
            if isinstance(fakes, (list, tuple)):
                results.append(self.opaque(node, fakes[index], key))
            for name, leaves_written in zip(names, targets, strict=True):
                if index < len(leaves_written):
                    of, fake, place = leaves_written[index]
                    value = self.opaque(of, fake, ("written", name, key))
                    self._write_tensor(place, value, (node, (name, index)))
        return results

    def _leaves(self, node: Any) -> list[tuple[fx.Node, Any, Place]]:
        """Returns the tensors of a node that have memory, with their fake values."""
        if not isinstance(node, fx.Node):
            return []
        found = zip(leaves(self._facts[node]), self._facts.places[node], strict=True)
        return [(node, fake, place) for (fake, _), place in found if place is not None]

    def _note_count(self, old: Result, new: Result) -> None:
        """Notes what a bounds check writes over a count of bad ids: to further checks it is where that began."""
        if isinstance(old, Value) and isinstance(new, Value):
            self._counts[new.number] = self._counts.get(old.number, old.number)

    def _moved(self, node: fx.Node, fake: Any, target: Any) -> Result:
        """Returns what a rule says of an operator, or of the one that does the same out of place."""
        if target not in RULES:
            return None
        name, rule = RULES[target]
        if target in movement.IDENTITIES and isinstance(x := self._read(argument(node)), Value):
            self._done.axioms.add(name)
            return x
        if (seen := self._facts.geometries[node]) is None or None in seen:  # sizes or strides depend on data
            return None
        args, kwargs = self._plain(target, node.args, node.kwargs)
        args, kwargs = evaluated(args, self._read), evaluated(kwargs, self._read)
        if target == torch.ops.aten.constant_pad_nd.default:
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
        args, kwargs = evaluated((node.args, node.kwargs), self._number)
        key = ("collective", str(node.target), freeze(args), freeze(kwargs))
        fake = self._facts[node]
        result: Result = None
        if node.target == ALL_GATHER and isinstance(sent, Value) and geometry(fake) is not None:
            group = str(collective_group(node))
            result = movement.gathered(self._table, sent, int(node.args[1]), group, tuple(fake.shape))  # type: ignore[arg-type]
            if result is not None:
                self._done.axioms.add("all-gather")
        if result is None:
            result = self.opaque(node, fake, key)
        if isinstance(sent, Value) and isinstance(result, Value) and node.target == ALL_TO_ALL:
            self._exchanges.send(
                sent.number,
                result.number,
                node,
                str(collective_group(node)),
                is_made_of_sizes=argument(node).target == SIZE_TENSOR,
            )
        self._waiting[node] = self._brought[node] = result
        given = tuple(
            each for each in (self._read(x) for x in node.all_input_nodes) if isinstance(each, Value)
        )
        is_followed = isinstance(sent, Value) and sent.number in self._exchanges
        launch = Collective(node, given, str(collective_group(node)), freeze(args[1:]), is_followed)
        self._done.collectives.append(launch)
        return self._table.other(("launched", key, len(self._done.collectives)))

    def _unpacked(self, node: fx.Node, fakes: Any) -> list[Any] | None:
        """Returns what each of several all-to-alls brings that travelled as one."""
        received = self._read(argument(node))
        splits = evaluated(node.args[1], self._number)
        if not isinstance(received, Value):
            return None
        if received.number in self._exchanges.made_of_sizes:
            self._done.unknown = str(SIZE_TENSOR)
        found = self._exchanges.unpack(received.number, node, splits)
        if found is None:
            return None
        self._done.axioms.add(EXCHANGED)
        members, group = found
        arguments = [([*each.output_splits], [*each.input_splits], group) for each in members]
        self._done.unpacked[node] = [freeze(each) for each in arguments]
        return [
            self.opaque(node, fake, ("collective", str(ALL_TO_ALL), freeze([member.sent, *given]), ()))
            for member, given, fake in zip(members, arguments, fakes, strict=True)
        ]

    def _random_state(self, node: fx.Node, fake: Any) -> Result:
        if node.target == READ_RANDOM_STATE:
            return self.opaque(node, fake, ("state read", self._random))
        state = self._read(node.all_input_nodes[0])
        self._random = self._table.source(("state set", state.number))
        if isinstance(state, Value) and state.pieces is not None and len(state.pieces) == 1:
            key = self._table.key(state.pieces[0].source)
            if key[0] == "state read" and state.pieces[0].offset == 0:
                self._random = key[1]
        return None


def origin_of_padding(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str | None:
    """Returns the input of which a padded tensor is a part: other ranks' parts may be larger."""
    while node not in inputs:
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.target not in RULES:
            return None
        node = node.all_input_nodes[0]
    return inputs[node]


def _is_function(target: Any) -> bool:
    """Whether the results of an operator of FBGEMM that may have a state follow from its arguments."""
    return str(target) == BOUNDS_CHECK or TRACED_LOOKUP.fullmatch(str(target)) is not None


def _parts_of(key: Any) -> Any:
    """Returns the parts of a call's key, without what came before it."""
    while key[0] in ("drawn", "hidden"):
        key = key[1]
    return key


def _views(call: FunctionalizedCall) -> list[Any]:
    """Returns which bases a call writes, argument by argument."""
    found: list[Any] = []
    for view in call.writes.values():
        found += view if isinstance(view, list) else [view] * (view is not None)
    return found


def _written_bases(view: Any, bases: Sequence[fx.Node]) -> Any:
    """Returns the bases in place of what says which of them an argument is."""
    if isinstance(view, list):
        return [_written_bases(each, bases) for each in view]
    return None if view is None else bases[view.base]
