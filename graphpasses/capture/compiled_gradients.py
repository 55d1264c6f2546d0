"""A compiled backward gives the gradients that eager's gives, or says why it cannot."""

from __future__ import annotations

import math
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphpasses._torch.aot_autograd import added_in_this_backward, boxed
from graphpasses._torch.aot_values import adds_gradients, describe_input, described_outputs
from graphpasses._torch.fx_graphs import copy_module
from graphpasses._torch.module_hooks import gradient_hooks
from graphpasses._torch.surroundings import after_this_backward, backward_node, goes_on_to, never_compiled
from graphpasses.analysis.effects import has_gradient, reached_outputs
from graphpasses.analysis.uses import num_uses
from graphpasses.capture.absent_gradients import find_tangents, leave_out
from graphpasses.capture.autocast_casts import autocasts_around
from graphpasses.capture.late_updates import Compile, Compiled, compile_whole
from graphpasses.errors import FidelityError, UnsupportedError
from graphpasses.fbgemm.lookups import find_triggers
from graphpasses.graph import DynamoGraph, InputKind
from graphpasses.graph.accumulation import shared_values
from graphpasses.graph.nodes import fake_value, storages
from graphpasses.identity import same_bits
from graphpasses.ops.autograd_functions import alias_tensors, behind_uses, token_of, use_apart


def find_views_returned(graph: DynamoGraph) -> str | None:
    """Says which outputs of a graph are views of one tensor whose gradients eager may add in another order.

    AOTAutograd makes views that it returns outside of its graph, so that their gradients come before all that the
    graph adds itself.
    """
    output = graph.graph.output_node()
    places: dict[Any, dict[fx.Node, int]] = defaultdict(dict)
    for place, node in enumerate(output.args[0]):  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and has_gradient(node):
            for memory in storages(node):
                places[memory].setdefault(node, place)
    for memory, each in places.items():
        if len(set(map(_made_by, each))) < 2:
            continue
        inside = [node for node in graph.graph.nodes if memory in storages(node)]
        readers = {user for node in inside for user in node.users if user is not output and has_gradient(user)}
        if len(each) > 2 or readers - {*inside}:
            outputs = ", ".join(map(str, each.values()))
            return (
                f"outputs {outputs} of a compiled graph are views of one tensor: if the loss uses several of them, "
                "eager may add their gradients in another order. Return one, and make its views outside"
            )
    return None


def copy_held(graph: fx.Graph) -> None:
    """Copies views that are gradients where eager does: autograd does not see who else reads them in the graph."""
    output, outputs = graph.output_node(), described_outputs(graph)
    given = {describe_input(node)[0]: node for node in graph.find_nodes(op="placeholder")}
    values = [each.value for each in outputs]
    sources = {at: [given[of]] for at, (_, of, *_) in enumerate(outputs) if of is not None and of in given}
    for index in shared_values(values, sources) & sources.keys():
        value = values[index]
        made = value.args[0] if value.target is operator.getitem else value
        if getattr(made.target, "is_view", False):
            with graph.inserting_before(output):
                values[index] = graph.call_function(torch.ops.aten.clone.default, (value,))
            values[index].meta.update(value.meta)
            values[index].meta["val"] = fake_value(values[index])
    output.args = (values,)


def _made_by(node: fx.Node) -> fx.Node:
    """Returns the call that makes a tensor, maybe one of several that share no element, as ``chunk`` makes them."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and not isinstance(source.meta.get("val"), Tensor) else node


class CompiledGradients:
    """What eager would do with the gradients of a compiled graph's inputs, each in its place.

    The graph adds the gradients of all uses in it, and eager adds each to what other graphs' uses, and those that
    are not compiled, have given: of some inputs backward returns the gradient of each use, too. Not of those of which
    a view comes out of the graph, nor of ``reduced`` parameters: of a model that reduces gradients in hooks.
    ``keeps_bits`` is whether what compiled the graph adds as eager does.
    """

    def __init__(self, graph: DynamoGraph, *, keeps_bits: bool, reduced: bool) -> None:
        reached, nodes, triggers = reached_outputs(graph.graph), graph.placeholders, find_triggers(graph.graph)
        self._names = [item.fqn for item in graph.inputs]
        self._reached = [reached.get(node, frozenset()) for node in nodes]  # the outputs that come from an input
        # Lookups that update their tables in backward.
        self._triggers = [index for index, node in enumerate(nodes) if node in triggers]
        self._keeps_bits = keeps_bits
        # Of the gradient that eager gives each input, if the graph keeps bits.
        self._num_summands: Sequence[int] = ()
        # A call of the backward that the autocast around forward casts if both are in its block.
        self.cast: str | None = None
        values = [each for each in graph.graph.output_node().args[0] if isinstance(each, fx.Node)]  # type: ignore[union-attr]
        returned = Counter(memory for each in values for memory in storages(each))
        # AOTAutograd makes views of its inputs that a graph returns outside of the joint graph.
        self._num_views = [sum(returned[memory] for memory in storages(node)) for node in nodes]
        kinds = {InputKind.VALUE} if reduced else {InputKind.VALUE, InputKind.PARAMETER}
        self._open: set[int | None] = {
            index for index, item in enumerate(graph.inputs) if item.kind in kinds and not self._num_views[index]
        }
        self._graph: DynamoGraph | None = graph  # until all of it is compiled: the model goes with what calls it
        self._num_uses: dict[int, int] = {}
        self._places: dict[int, slice] = {}  # of each input's gradients, in what the backward graph returns
        self._firsts: dict[int, int] = {}  # the places of their sums
        self.is_rewritten = False  # whether the backward graph went through the passes
        self._num_outputs: int | None = None  # of the backward graph, once there is one
        self._returned = threading.local()

    def read(self, joint: fx.Graph) -> None:
        """Reads from a joint graph how many gradients eager adds for each input."""
        for node in chain.from_iterable(joint.find_nodes(op="call_function", target=each) for each in _REPLACE):
            self._open.discard(describe_input(node.args[0])[0])  # an alias would be replaced
        assert self._graph is not None
        counts, given = [*self._num_views], self._graph.placeholders
        has_sums = any(map(adds_gradients, joint.nodes))
        reached = reached_outputs(self._graph.graph) if has_sums else {}
        for value, index, written, attr, _ in described_outputs(joint):
            if written is not None:
                self._open.discard(written)
            if index is not None and isinstance(value, fx.Node):
                num_summands = 1
                if adds_gradients(value):  # what is used may pass on a sum of its own
                    every = len(_summands(value))
                    num_summands = min(every, num_uses(given[index], reached.__contains__) or every)
                counts[index] = max(counts[index], self._num_views[index] + num_summands)
                if not attr and index in self._open and counts[index] > 1:
                    self._num_uses[index] = num_summands
        for index in self._num_uses.keys() - self._open:
            del self._num_uses[index]
        self._num_summands = counts

    def forget(self) -> None:
        """Forgets the graph, of which a joint graph was read, or none will be."""
        self._graph = None

    def return_apart(self, backward: fx.Graph) -> None:
        """Lets a backward graph return the gradients of uses after its outputs, the first in place of their sum."""
        output = backward.output_node()
        outputs = described_outputs(backward)
        values = [each.value for each in outputs]
        self._num_outputs = len(values)
        sums: list[fx.Node] = []
        for place, (value, index, *_) in enumerate(outputs):
            if index in self._num_uses and isinstance(value, fx.Node):
                summands = _summands(value, self._num_uses[index])
                if len(summands) == self._num_uses[index]:
                    self._places[index] = slice(len(values), len(values) + len(summands))
                    values += summands
                    values[place] = summands[0]
                    self._firsts[index] = place
                    sums.append(value)
        output.args = (values,)
        for value in dict.fromkeys(sums):
            while adds_gradients(value) and not value.users:
                value, unused = value.all_input_nodes[0], value
                backward.erase_node(unused)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> Compiled:
        """Compiles a backward graph; of what it returns these gradients are left for the call's hook to take."""
        compiled = {frozenset[int](): compile_whole(module, inputs, compile_graph)}
        self.is_rewritten, places = True, frozenset(find_tangents(module.graph).values())

        def run(values: list[Any]) -> Any:
            absent = places & self._returned.__dict__.pop("absent", frozenset())
            absent = absent if absent != places else frozenset()
            if absent not in compiled:
                compiled[absent] = compile_whole(self._without(module, absent), inputs, compile_graph)
            results = compiled[absent](values)
            if not self._places:
                return results
            self._returned.results = results
            return results[: self._num_outputs]

        return boxed(run)

    def _without(self, module: fx.GraphModule, absent: Collection[int]) -> fx.GraphModule:
        """Returns a backward graph as it was compiled, without the gradients of some outputs."""
        part = copy_module(module)
        leave_out(part.graph, absent)
        output = part.graph.output_node()
        values: list[Any] = [*output.args[0]]  # type: ignore[misc]
        for index, uses in self._places.items():
            values[self._firsts[index]] = next((each for each in values[uses] if each is not None), None)
        output.args = (values,)
        return part

    def use(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, list[Tensor | None]]]:
        """Returns what a call takes for its inputs, and where the gradients of uses are put."""
        taken: dict[int, list[Tensor | None]] = {}
        values = list(inputs)
        for index, count in self._num_uses.items():
            if self._num_outputs is not None and index not in self._places:
                continue  # a pass made of the sum another
            if values[index].requires_grad and torch.is_grad_enabled():
                taken[index] = []
                values[index] = use_apart(values[index], count, taken[index])
        return values, taken

    def _take(self, taken: dict[int, list[Tensor | None]]) -> set[int]:
        """Puts the gradients of uses where autograd takes them; returns of which inputs there are any."""
        results = self._returned.__dict__.pop("results", ())
        found = taken.keys() & self._places.keys()
        for index in found:
            taken[index][:] = results[self._places[index]]
        return found

    def follow(self, outputs: Sequence[Any], inputs: Sequence[Any], taken: dict[int, list[Tensor | None]]) -> None:
        """Lets the backward of a call give no gradient that eager does not give; ``use`` made ``taken``.

        Where the loss does not depend on an output, AOTAutograd gives zeros to what that output alone comes from.
        """
        if (node := backward_node(outputs, inputs)) is None:
            return
        if triggers := [get_gradient_edge(inputs[index]) for index in self._triggers if inputs[index].requires_grad]:
            node.register_prehook(partial(_check_tables_reached, triggers))
        places = {each.output_nr: i for i, each in enumerate(outputs) if getattr(each, "grad_fn", None) is node}
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        if self._keeps_bits:
            node.register_prehook(partial(_note_absent, self._returned, places))
        several = {index for index, count in enumerate(self._num_summands) if count > 1}
        watched = {index for index in several if not gradient_hooks(inputs[index])}  # which may give others
        this = ref(node)

        def after(
            gradients: Sequence[Tensor | None], given: Sequence[Tensor | None]
        ) -> tuple[Tensor | None, ...] | None:
            apart = self._take(taken)
            if len(gradients) != len(tensors):  # one that was given twice, or views of one
                return None
            arrived = {places.get(number) for number, gradient in enumerate(given) if gradient is not None}
            kept = [
                None if None not in arrived and self._reached[i] and arrived.isdisjoint(self._reached[i]) else each
                for each, i in zip(gradients, tensors, strict=True)
            ]
            if not self._keeps_bits:
                return tuple(kept)
            if self.cast and autocasts_around():
                raise FidelityError(
                    f"backward runs under autocast, which in eager casts what {self.cast} is given, and nothing in a "
                    "compiled graph. Call backward after the block of autocast, as PyTorch advises, in both runs"
                )
            added, edges = added_in_this_backward(), this().next_functions  # type: ignore[union-attr]
            for index, edge, gradient in zip(tensors, edges, kept, strict=True):
                if gradient is None or index in apart:
                    continue
                if index in taken:  # a pass made another sum
                    edge = behind_uses(edge)
                if edge in added and index in several:
                    raise FidelityError(_SEVERAL.format(self._names[index]))
                if index in watched:
                    added[edge] = gradient
                    check = partial(_check_alone, edge, self._names[index])
                    after_this_backward(edge[0].register_prehook(check).remove)
                else:
                    before = added.get(edge)
                    added[edge] = None if before is None else before + gradient
            return tuple(kept)

        node.register_hook(after)
        token = token_of(*(inputs[index] for index in tensors if inputs[index].requires_grad))
        node.register_hook(partial(_refuse_derivative, token))


# An assignment to `.data` of an input; torch 2.15 has an operator of its own for it.
_OF_DATA = getattr(torch.ops.aten, "shallow_copy_data_", None)
_REPLACE = [torch.ops.aten.set_.source_Tensor, *([] if _OF_DATA is None else [_OF_DATA.default])]


def _summands(value: fx.Node, num_summands: float = math.inf) -> list[fx.Node]:
    """Returns the gradients that are added to one, the first first, so many at most."""
    found: list[fx.Node] = []
    while adds_gradients(value) and len(found) + 1 < num_summands:
        before, last = value.args
        assert isinstance(before, fx.Node)
        assert isinstance(last, fx.Node)
        found.insert(0, last)
        value = before
    return [value, *found]


@never_compiled
def _note_absent(noted: threading.local, places: Mapping[int, int], given: Sequence[Tensor | None]) -> None:
    """Notes of which outputs no gradient arrives; ``places`` are theirs, by number."""
    noted.absent = {place for number, place in places.items() if given[number] is None}


@never_compiled
def _refuse_derivative(
    token: Tensor, gradients: Sequence[Tensor | None], _: object
) -> tuple[Tensor | None, ...] | None:
    """Has gradients that may get gradients raise there; ``token`` depends on all inputs, as they may not."""
    if not torch.is_grad_enabled():
        return None
    made = (each for each in gradients if each is not None)
    aliases = iter(alias_tensors(*made, token, before_backward=_refuse_second_backward))
    return tuple(each if each is None else next(aliases) for each in gradients)


def _refuse_second_backward(_: object) -> None:
    raise UnsupportedError(
        "a gradient of a gradient (create_graph=True) goes through a compiled graph, whose backward has none. Call "
        f"the model for it {_FORCE_EAGER}, or leave what is derived twice uncompiled"
    )


_FORCE_EAGER = 'under torch.compiler.set_stance("force_eager")'


@never_compiled
def _check_tables_reached(triggers: Sequence[GradientEdge], _: Sequence[Tensor | None]) -> None:
    """Raises if eager's backward would leave tables alone, which a compiled one updates with all others."""
    if not all(map(goes_on_to, triggers)):
        raise UnsupportedError(
            "autograd.grad(...), or backward(inputs=...), goes through a compiled graph that updates tables in "
            f"backward, and eager would leave these as they are. Call the model for it {_FORCE_EAGER}, or call "
            "backward() for all"
        )


_SEVERAL = (
    "eager adds the gradients of all uses of {!r} one by one, and a compiled graph has several of them, but not all. "
    "Compile a function that makes all these calls, without graph breaks, or run backward after each"
)


def _check_alone(edge: Any, name: str, arrived: Sequence[Tensor | None]) -> None:
    """Raises if others than compiled graphs have added to a gradient of which one graph has several uses."""
    ours, total = added_in_this_backward().pop(edge, None), arrived[edge[1]]
    if ours is not None and total is not None and total is not ours and not same_bits(total, ours):
        raise FidelityError(_SEVERAL.format(name))
