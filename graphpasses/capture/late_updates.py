"""Updates of tables wait until the gradients of dense layers have left a compiled backward, and are being reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses._torch.surroundings import after_this_backward
from graphpasses.analysis.dependencies import dependencies
from graphpasses.analysis.effects import operator_effects
from graphpasses.graph.nodes import WAIT, argument, find_collectives, is_collective, is_empty, reach
from graphpasses.ops.autograd_functions import alias_tensors

Compiled = Callable[[list[Any]], Any]
# Given a graph, fake inputs, and for each of them which of the backward's inputs it is, or -1.
Compile = Callable[[fx.GraphModule, list[Any], list[int]], Compiled]


def compile_whole(module: fx.GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> Compiled:
    """Compiles a backward graph as it is."""
    return compile_graph(module, [*inputs], [*range(len(inputs))])


class LateUpdates:
    """Runs what a compiled backward does after its gradients, where DistributedDataParallel reduces these.

    All gradients leave a compiled backward at once, so that DistributedDataParallel, which reduces them as they are
    accumulated, would launch nothing before all tables are updated. What no gradient and no launch needs, and what
    waits for the gradients of embeddings, runs at the turn of a node of autograd that was made just before the
    backward's: after its gradients are accumulated, and before anything that eager runs later. All collectives are
    launched before, on all ranks, whatever each of them has to update.
    """

    def __init__(self, device: torch.device) -> None:
        self._waiting: list[Callable[[], object]] = []
        # What compiled graphs take beside their inputs; of another device, another thread of autograd would pass it.
        self.empty = torch.empty(0, device=device, requires_grad=True)

    def token(self) -> Tensor:
        """Returns what a call of a compiled graph takes; what waits runs when a backward has passed it."""
        self.run()  # where a backward stopped with an error
        return alias_tensors(self.empty, before_backward=self.run)[0] if torch.is_grad_enabled() else self.empty

    def run(self, _: Any = None) -> None:
        """Runs what waits."""
        while self._waiting:
            self._waiting.pop(0)()

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> Compiled:
        """Compiles a backward graph, as two where something in it can wait."""
        _empty_outputs(module.graph)
        late = find_late(module.graph)
        if not late:
            return compile_whole(module, inputs, compile_graph)
        (first, first_places), (rest, rest_places), num_outputs = split(module, late)

        def compile_part(part: fx.GraphModule, places: list[int]) -> Compiled:
            nodes = part.graph.find_nodes(op="placeholder")
            fakes = [node.meta["val"] if at < 0 else inputs[at] for node, at in zip(nodes, places, strict=True)]
            return compile_graph(part, fakes, places)

        run_first, run_rest = compile_part(first, first_places), compile_part(rest, rest_places)
        num_given = sum(at >= 0 for at in rest_places)

        def run(values: list[Any]) -> Any:
            given, later = [[values[at] for at in places if at >= 0] for places in (first_places, rest_places)]
            values.clear()
            results = [*run_first(given)]
            crossing = results[num_outputs:]

            def update() -> None:
                device = next(each.device for each in crossing if isinstance(each, Tensor))
                with torch.no_grad(), torch.autocast(device.type, enabled=False):
                    run_rest([*later, *crossing[: len(rest_places) - num_given]])
                crossing.clear()  # until now: collectives may have read them

            self._waiting.append(update)
            after_this_backward(self.run)  # where it does not reach the token
            return results[:num_outputs]

        return run


def find_late(graph: fx.Graph) -> set[fx.Node]:
    """Returns what waits for collectives, and what needs these: not what an output or a launch needs."""
    needed = dependencies(graph, operator_effects, in_turn=is_collective)
    early = reach([graph.output_node(), *find_collectives(graph)], needed.__getitem__)
    late: set[fx.Node] = set()
    for node, others in needed.items():
        waits = node.target == WAIT and is_collective(argument(node)) and node not in early
        if waits or not late.isdisjoint(others):
            late.add(node)
    return late


def _empty_outputs(graph: fx.Graph) -> None:
    """Lets outputs without elements need nothing, as the gradient of lookups on a rank that has no tables."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not is_empty(node):
            continue
        if all(type(size) is int for size in value.shape):
            with graph.inserting_before(output):
                empty = graph.call_function(
                    torch.ops.aten.empty.memory_format,
                    (list(value.shape),),
                    {"dtype": value.dtype, "device": value.device},
                )
            empty.meta.update(node.meta)
            output.replace_input_with(node, empty)


def split(
    module: fx.GraphModule, late: Collection[fx.Node]
) -> tuple[tuple[fx.GraphModule, list[int]], tuple[fx.GraphModule, list[int]], int]:
    """Returns a graph as two, each with the positions of its inputs among the whole one's, and the number of outputs.

    The first returns after the outputs what ``late`` reads, which the second takes after its inputs; and then what
    collectives read for which ``late`` waits.
    """
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    early = [each for each in module.graph.nodes if each.op not in ("placeholder", "output") and each not in late]
    rest = [each for each in module.graph.nodes if each in late]
    constants = [each for each in early if each.op == "get_attr"]
    read = {source: None for each in rest for source in each.all_input_nodes}
    crossing = [each for each in early if each in read and each.op != "get_attr"]
    sent = [source for each in crossing if is_collective(each) for source in each.all_input_nodes]
    values: Any = output.args[0]

    def inputs_of(nodes: Iterable[fx.Node], outputs: Collection[Any] = ()) -> list[fx.Node]:
        used = {source for each in nodes for source in each.all_input_nodes}.union(
            each for each in outputs if isinstance(each, fx.Node)
        )
        sizes = (each for each in placeholders if isinstance(each.meta.get("val"), torch.SymInt))
        used.update(sizes)  # they may be part of other sizes
        return [each for each in placeholders if each in used]

    def part(inputs: list[fx.Node], nodes: list[fx.Node], outputs: Sequence[Any]) -> tuple[fx.GraphModule, list[int]]:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for each in inputs:
            made[each] = graph.placeholder(each.name)
            made[each].meta.update(each.meta)
        for each in nodes:
            made[each] = graph.node_copy(each, made.__getitem__)
        end = graph.output(fx.node.map_arg([*outputs], made.__getitem__))
        descriptions = [*output.meta.get("desc", [None] * len(values))]
        end.meta["desc"] = (descriptions + [None] * len(outputs))[: len(outputs)]
        result = fx.GraphModule(module, graph)
        result.meta.update(module.meta)
        place = {each: index for index, each in enumerate(placeholders)}
        return result, [place.get(each, -1) for each in inputs]

    outputs = [*values, *crossing, *sent]
    return (
        part(inputs_of(early, outputs), early, outputs),
        part([*inputs_of(rest), *crossing], [*constants, *rest], []),
        len(values),
    )
