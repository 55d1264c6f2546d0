"""Evaluate a graph on numbers of values: what it returns, what it writes, what it sends."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.gloo import ALL_GATHER
from graphpasses._torch.group_ranks import named_group, named_group_ranks
from graphpasses._torch.schemas import draws, named_arguments, read_functionalized_call
from graphpasses.analysis.effects import (
    draws_random_numbers,
    has_hidden_state,
    is_check,
    is_elementwise_on_lists,
    names_written,
    written_inputs,
)
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument
from graphpasses.graph.nodes import (
    EXACT_REGION,
    METADATA_OPS,
    attribute,
    collective_group,
    freeze,
    is_collective,
    read_constants,
)
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.graph.train_graph import InputKind, OutputKind, Stage
from graphpasses.ops.join_lookups import JOIN_BAGS
from graphpasses.ops.pack_all_to_all import PACK, PACK_POOLED_EMBEDDINGS, UNPACK
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE
from graphpasses.proof import movement
from graphpasses.proof.arrivals import Arrivals
from graphpasses.proof.calls import GRADIENT, LOSS, VALUE, is_function
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.operators import AXIOMS, RULES
from graphpasses.proof.core.values import Result, Value
from graphpasses.proof.core.views import known_size
from graphpasses.proof.elements import held_numbers
from graphpasses.proof.evaluated import Collective, Evaluated
from graphpasses.proof.exchanges import COLUMNS, PACKED, Packs
from graphpasses.proof.rows import RowValues
from graphpasses.proof.sizes import AXIOM as EXCHANGED_SIZES
from graphpasses.proof.sizes import READ, Sizes, unpacked
from graphpasses.proof.spelling import evaluated

aten = torch.ops.aten
# By name: TorchRec defines them, if it is there.
_TO_COLUMNS, _FROM_COLUMNS = (f"torchrec._split_1d_cat_2d{name}.default" for name in ("", "_backward_impl"))
_SPLIT = RULES[aten.split_with_sizes.default][1]
_ASYNCHRONOUS = ("_c10d_functional.", "_c10d_functional_autograd.")  # whose operators return what is still to come
# By name: torch has these operators where its module of them was imported.
OFFLOADING = frozenset({"ao.offload.default", "ao.reload.default", "ao.wait_tensor.default"})

EXACT_KERNELS = "exact kernels"
AXIOMS[EXACT_KERNELS] = (
    "groups of operators run as one kernel by Inductor, with contraction off, signed zeros kept and each result "
    "rounded: IEEE 754 fixes the bits of what stands in them (+, -, *, /, casts, comparisons, selects, copies), or "
    "it is a function of half precision that has eager's bits for all values; each kernel is run beside eager's "
    "operators before it is used"
)


class Evaluation(Arrivals):
    """Evaluates a graph of ATen operators, node by node; two graphs that share ``values`` can be compared.

    ``given`` has the values of inputs that are known, by name; ``constants`` say what constants held before a pass
    could write them; ``before`` is what was evaluated before this, which goes on with its random numbers; ``sizes``
    are those of both graphs, ``outside`` the ids of tensors whose owner may write them.
    """

    def __init__(
        self,
        graph: TrainGraph,
        values: RowValues,
        facts: Facts,
        given: Mapping[str, Result] | None = None,
        constants: Mapping[str, Hashable] | None = None,
        before: Evaluated | None = None,
        sizes: Sizes | None = None,
        outside: Collection[int] = (),
    ) -> None:
        super().__init__(values, facts, sizes or Sizes(values))
        self._outside = outside
        self._columns = self._sizes.columns
        self._graph = graph
        if before is not None:
            self._random, self._hidden = before.random_state, before.hidden_state
        self._constants = {**read_constants(graph.graph), **(constants or {})}
        self._given = given or {}
        self._packs = Packs(facts)
        self._done = Evaluated(values=self._of, made=self._made, axioms=self._axioms, broken=self._broken)

    def run(self) -> Evaluated:
        done, graph = self._done, self._graph
        for item, node in zip(graph.inputs, graph.placeholders, strict=True):
            fqn = graph.identity.canonical(item.fqn) if item.is_state else item.fqn
            state = f" {item.state}" if item.state else ""
            self._inputs[node] = f"{item.kind.value} {fqn}{state}{f' ({item.attr})' if item.attr else ''}"
            name = f"gradient {fqn}" if item.kind is InputKind.GRADIENT else self._inputs[node]
            if name in self._given:
                done.values[node] = self._given[name]
        # What a constant held before the first call; it is read where it is.
        for node in sorted(graph.graph.nodes, key=lambda node: node.op != "get_attr"):
            self._look_for_chance(node)
            if EXACT_REGION in node.meta:
                self._axioms.add(EXACT_KERNELS)
            if node.op == "output":
                break
            value = self.evaluate_node(node)
            if is_check(node):
                done.checks.setdefault(*self._check(node))
            is_sure = node.target == READ or node not in self._facts.guessed
            if is_sure and isinstance(value, Value) and isinstance(fake := self._facts[node], torch.SymInt):
                value = self._sizes.named(node, fake, value)
            done.values[node] = value
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Value):
                    done.makers.setdefault(each.number, node)
        done.broken += [(node, f"{node.name} is launched and never waited for") for node in self._launched()]
        self._axioms |= {EXACT_KERNELS} if graph.runs_as is not None else set()
        self.evaluate_outputs()
        done.random_state, done.hidden_state = self._random, self._hidden
        return done

    def evaluate_outputs(self) -> None:
        """Notes the values of the outputs, after all nodes."""
        done, graph = self._done, self._graph
        counts: dict[str, int] = {}
        for index, (item, node) in enumerate(zip(graph.outputs, graph.output_values, strict=True)):
            if item.is_loss:
                name = LOSS
            elif item.is_gradient:
                fqn = graph.identity.canonical(item.fqn)
                name = f"{GRADIENT}{fqn!r}"
                if node is None or (item.is_applied and not graph.applies(fqn)):
                    continue
            elif item.kind in (OutputKind.LEFT, OutputKind.MEMORY, OutputKind.RETURNED):
                name = f"{item.kind.value} {item.fqn!r}"
            elif item.kind is OutputKind.VALUE:
                name = f"{VALUE}{index}"
            else:
                continue
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > 1:
                name += f" ({counts[name]})"
            if isinstance(node, fx.Node):
                done.outputs[name], done.nodes[name] = self._read(node), node
            else:
                done.outputs[name] = None if node is None else self._table.other(("returned", freeze(node)))
        done.lies = self._lies(done.nodes, is_step=graph.stage is Stage.STEP)
        for (root, _), held in self._held.items():
            if root.op in ("placeholder", "get_attr"):
                name = self._inputs.get(root, f"the attribute {root.target}")
                done.written[name] = held.value
                done.nodes[name] = held.by
                if held.beyond is not None:
                    done.written[f"what lies beside {name}"] = self._table[held.beyond]

    # ---- one node -------------------------------------------------------------------------------------------------

    def evaluate_node(self, node: fx.Node) -> Result:
        """Returns the value of a node, after those before it."""
        fake = self._facts[node]
        if node.op == "placeholder":
            given = self._of.get(node)
            return self.opaque(node, fake, ("input", self._inputs[node])) if given is None else given
        if node.op == "get_attr":
            held = self._constants[str(node.target)]
            if id(attribute(node)) in self._outside:
                return self.opaque(node, fake, ("attribute", held, id(attribute(node))))
            if (integers := held_numbers(self._table, held)) is not None:
                self._axioms.add("constants")
            return integers or self.opaque(node, fake, ("attribute", held))
        if self._is_part(node):
            return self._of[argument(node)][node.args[1]]  # what its memory holds since is read where this is
        if is_collective(node) or (str(node.target).startswith(_ASYNCHRONOUS) and node.target != WAIT):
            return self._launch(node)
        if node.target == WAIT:
            self._wait_for(node)
        if node.target == UNPACK and (unpacked := self._unpacked(node, fake)) is not None:
            return unpacked
        if node.target in METADATA_OPS:
            return self._size(node, fake)
        if node.target == READ and (size := self._sizes.read(self._read(argument(node)))) is not None:
            return size
        if str(node.target) in OFFLOADING:
            return self._offloaded(node)
        if (cut := self._cut(node)) is not None:
            return cut
        writes = written_inputs(node)
        if node.target in RULES and not writes and collective_group(node) is None:
            found = self.moved_value(node, node.target)
            if found is not None:
                self._note_columns(node, found)
                return found
        if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE):
            return self._random_state(node, fake)
        call = read_functionalized_call(node)
        if call is not None and (results := self._functionalized(node, call)) is not None:
            return results
        if is_elementwise_on_lists(node.target) and not self._overlaps(node, names_written(node)):
            return self._each(node)
        key: Any = self._call(node.target, node.args, node.kwargs)
        if overlaps := self._overlaps(node, names_written(node)) if writes else ():
            key = (*key, "overlapping", overlaps)
        if (group := collective_group(node)) is not None:  # it brings what it brings at once
            key = self._in_turn_of(node.name, key)
            self._done.collectives.append(Collective(node, self._sent_by(node), str(group), key, is_followed=False))
        has_state = has_hidden_state(node) and not draws(node) and not is_function(node.target)
        key = self._after_others(draws_random_numbers(node), has_state, key)
        result = self.opaque(node, fake, key)
        if node.target == PACK and isinstance(result, Value):
            given = self._arguments(node)[0]
            self._packs.pack(result.number, given, evaluated(given, self._number))
        self._note_columns(node, result)
        if writes:
            return self._written(node, writes, key, result)
        return result

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a node takes one of several values that a call returned."""
        is_item = node.target is operator.getitem and isinstance(node.args[1], int)
        return is_item and isinstance(self._of[argument(node)], list)

    def _offloaded(self, node: fx.Node) -> Result:
        """Returns the value of an activation that is moved to the CPU or back; the wait frees its old memory."""
        self._axioms.add(movement.OFFLOADED)
        copied, *others = node.all_input_nodes
        value = self._read(copied)
        freed = node.args[1] if len(node.args) > 1 else node.kwargs.get("keepalive")
        if isinstance(freed, fx.Node) and freed in others:
            self._free(freed, by=node)
        return value

    def _size(self, node: fx.Node, fake: Any) -> Result:
        """Returns the value of a size."""
        (of, *dim), named = self._arguments(node)
        given = self._argument(of)
        is_sure = isinstance(fake, (int, torch.SymInt)) and not (self._facts.varies and node in self._facts.guessed)
        size = known_size(fake) if is_sure else None
        key = (size,) if type(size) is int else (str(node.target), given, *dim, freeze(named))
        return self.opaque(node, fake, ("size", *key))

    def _launch(self, node: fx.Node) -> Result:
        """Returns what a collective brings once someone waits for it."""
        sent, group = self._read(node.all_input_nodes[0]), str(collective_group(node))
        given_args, given_kwargs = self._arguments(node)
        writes = written_inputs(node)
        # What is sent from where it lies is sent in the order of its memory; of others a contiguous copy is.
        read = self._argument if writes else self._number
        args, kwargs = evaluated((given_args, given_kwargs), read)
        key: tuple[Any, ...] = ("collective", str(node.target), freeze(args), freeze(kwargs))
        fake = self._facts[node]
        result: Result = None
        if node.target == ALL_GATHER and isinstance(sent, Value) and isinstance(fake.numel(), int):
            if given_args[1] == len(named_group_ranks(group)):  # else it fails
                turn = self._sizes.turn_of_gather(sent, group, node.name, self._facts.by_name)
                result = movement.gathered(self._table, sent, int(given_args[1]), group, tuple(fake.shape), turn)
            self._axioms |= {"all-gather"} if result is not None else set()
        if node.target == ALL_TO_ALL and isinstance(sent, Value):
            sizes = [self._packs.sizes(each) for each in given_args[1:3]]
            result = self._brought(node, fake, args, sizes)
        if result is None:
            key = self._in_turn_of(node.name, key)
            result = self.opaque(node, fake, key)
        if isinstance(sent, Value) and isinstance(result, Value) and node.target == ALL_TO_ALL:
            self._packs.send(sent.number, result.number, given_args[1], given_args[2], group)
        members = self._packs.members(sent.number) if isinstance(sent, Value) else []
        given = tuple(map(self._table.__getitem__, members)) or self._sent_by(node)
        self._done.collectives.append(Collective(node, given, group, freeze(args[1:]), bool(members)))
        if writes:
            result = self._written(node, writes, key, result)
        self._launch_into(node)
        return result

    def _sent_by(self, node: fx.Node) -> tuple[Value, ...]:
        return tuple(each for each in map(self._read, node.all_input_nodes) if isinstance(each, Value))

    def _unpacked(self, node: fx.Node, fakes: Any) -> list[Any] | None:
        """Returns what each of several all-to-alls brings that travelled as one."""
        received = self._read(argument(node))
        splits = evaluated(self._arguments(node)[0][1], self._number)
        if not isinstance(received, Value):
            return None
        given = self._arguments(node)[0]
        is_known = self._columns.trusts(*self._packs.sizes(given[1]))
        found = self._packs.unpack(received.number, given, splits) if is_known else None
        if found is None:
            return unpacked(self._table, received, given[1:])
        self._axioms.add(PACKED)
        self._done.unpacked[node] = [freeze(each[1:]) for each, _ in found]
        members = enumerate(zip(found, fakes, strict=True))
        return [self._brought(node, fake, *each, member=index) for index, (each, fake) in members]

    def _in_turn_of(self, name: str, launch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns what a launch depends on beside what this rank sends: which one it is of several alike."""
        turn = self._sizes.turn(launch, name, self._facts.by_name)
        return (*launch[:-1], (*launch[-1], ("turn", turn))) if turn else launch

    def _brought(
        self, node: fx.Node, fake: Any, given: Any, sizes: Sequence[Sequence[Any]], member: int | None = None
    ) -> Result:
        """Returns what an all-to-all, or one of several, brings that is given numbers of values, cut by sizes."""
        sent, outputs, inputs, group = given
        name = node.name if member is None else f"{node.name}[{member}]"
        found = self._sizes.brought(name if member is None else "", self._table[sent.number], outputs, inputs, group)
        if found is not None:
            self._axioms.add(EXCHANGED_SIZES)
            return found
        key = self._in_turn_of(name, ("collective", str(ALL_TO_ALL), freeze(given), ()))
        brought = self.opaque(node, fake, key)
        row_shape = tuple(fake.shape[1:])
        if not isinstance(brought, Value) or any(type(each) is not int for each in row_shape):
            return brought
        own, kind, unit = named_group(group).rank(), (group, fake.dtype), math.prod(row_shape)
        found, is_merged = self._columns.launch(key, self._table[sent.number], brought, sizes, own, kind, unit)
        self._axioms |= {COLUMNS} if is_merged else set()
        return found

    def _note_columns(self, node: fx.Node, result: Any) -> None:
        """Notes a tensor in which columns for one rank follow those for another."""
        if node.target != JOIN_BAGS and all(user.target not in (ALL_TO_ALL, PACK) for user in node.users):
            return
        args, _ = self._arguments(node)
        if node.target == JOIN_BAGS:
            self._sizes.join_bags([self._facts[each] for each in args[1]], args[2], self._facts[node][1])
        if node.target == PACK_POOLED_EMBEDDINGS:
            pieces, nums = iter(args[0]), args[1]
            by_rank = [[*itertools.islice(pieces, num)] for num in nums]
        elif node.target == aten.cat.default and args[1:] in ((), (0,)):
            by_rank = [[each] for each in args[0]]
        elif str(node.target) == _FROM_COLUMNS:
            by_rank = [[args[0]]]
        else:
            return
        nodes = [each for of_rank in by_rank for each in of_rank]
        sizes = {size_expression(self._facts[each].shape[0]) for each in nodes if self._facts[each].dim() == 2}
        of_ranks: Any = [[self._table.row_of(self._read(each)) for each in of_rank] for of_rank in by_rank]
        if any(None in of_rank for of_rank in of_ranks) or len(sizes) != 1:
            return
        if str(node.target) == _FROM_COLUMNS:
            of_ranks = [[each] for each in _SPLIT(self._table, None, of_ranks[0][0], [*args[1]], 1) or ()]
        self._columns.send(result, sizes.pop(), of_ranks)

    def _cut(self, node: fx.Node) -> Result:
        """Returns the parts that ranks sent of what came from all; None if a call does something else."""
        is_split = node.target == aten.split_with_sizes.default
        if not is_split and str(node.target) != _TO_COLUMNS:
            return None
        args, kwargs = self._arguments(node)
        received = self._read(args[0])
        if kwargs or not isinstance(received, Value):
            return None
        if is_split:
            return None if any(args[2:]) else self._columns.split(received, self._packs.sizes(args[1]))
        return self._columns.joined(received, self._packs.sizes(args[1:2])[0], args[2])

    @functools.cached_property
    def _draws_elsewhere(self) -> bool:
        """Whether another generator than the CPU's is drawn from, read or set; only what sets a state asks."""
        drawing = [*filter(draws_random_numbers, self._graph.graph.nodes)]
        states = [node for node in drawing if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE)]
        drawn = pytree.tree_leaves([self._facts[node] for node in drawing])
        return any(named_arguments(node).get("device") is not None for node in states) or any(
            isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in drawn
        )

    def _random_state(self, node: fx.Node, fake: Any) -> Result:
        """Notes also a device's state as that of all generators: only the CPU's alone is known to be as before."""
        device = named_arguments(node).get("device")
        if node.target == READ_RANDOM_STATE:
            return self.opaque(node, fake, ("state read", self._random, device))
        state = self._read(node.all_input_nodes[0])
        if self._draws_elsewhere:
            self._random = self._table.source(("state set", state.number, device, self._random))
            return None
        self._random = self._table.source(("state set", state.number))
        if isinstance(state, Value) and state.pieces is not None and len(state.pieces) == 1:
            key = self._table.key(state.pieces[0].source)
            if key[0] == "state read" and state.pieces[0].offset == 0:
                self._random = key[1]
        return None
