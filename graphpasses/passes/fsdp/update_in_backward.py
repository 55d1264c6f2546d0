"""Update each parameter as soon as its gradient is there, so that gradients never live all at once."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpasses.analysis.effects import is_elementwise_on_lists, is_written, written_inputs
from graphpasses.graph import InputKind, OutputKind, Stage, TrainGraph
from graphpasses.graph.nodes import last_reads, storages
from graphpasses.graph.train_graph import add_update_input
from graphpasses.graph.update import Update
from graphpasses.passes.runner import GraphPass, Numerics

Nodes = Mapping[str, fx.Node]  # by the FQN of a parameter


def _owners_of(update: Update) -> dict[fx.Node, Any] | str:
    """Returns the parameter for which each call of an update computes, of several results a list; None: for all.

    A string says which call needs several parameters at once.
    """
    owners: dict[fx.Node, Any] = {}
    placeholders = update.module.graph.find_nodes(op="placeholder")
    for item, node in zip(update.inputs, placeholders, strict=True):
        owners[node] = None if item.kind is InputKind.HYPERPARAMETER else item.fqn
    for node in update.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem:
            owners[node] = owners[node.args[0]][node.args[1]]
            continue
        lists = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (list, tuple))]
        if lists and is_elementwise_on_lists(node.target):
            length = max(map(len, lists))
            owners[node] = [_owner([each[index] for each in lists if each], owners) for index in range(length)]
            owner = _owner([value for value in node.args if isinstance(value, fx.Node)], owners)
            if owner is not None or any(each is ... for each in owners[node]):
                return str(node.target)
            continue
        owners[node] = _owner(node.all_input_nodes, owners)
        if owners[node] is ...:
            return str(node.target)
    return owners


def _owner(values: Sequence[Any], owners: Mapping[fx.Node, Any]) -> Any:
    """Returns the parameter that values belong to; None: to none, ``...``: to several."""
    found = {owners[value] for value in values if isinstance(value, fx.Node)} - {None}
    return ... if len(found) > 1 else next(iter(found), None)


def _reject_reason(graph: TrainGraph, update: Update, stored: Nodes, gradients: Nodes) -> str:
    if update.clip_norm is not None:
        return "clipping needs all gradients at once"
    if update.replaced:
        return "the optimizer replaces state {!r} of {!r} by another tensor at each step".format(
            *update.replaced[0][::-1]
        )
    owners = _owners_of(update)
    if isinstance(owners, str):
        return f"{owners} needs several parameters at once"
    if sum(1 for _ in graph.parameter_placeholders()) > len(stored):
        return "a parameter is read under several names; run deduplicate-shared"
    memory = storages(*stored.values())
    if shared := _find_shared(graph, update.gradients):
        return "{!r} and {!r} share memory".format(*shared)
    for output, value in zip(graph.outputs, graph.output_values, strict=True):
        if output.kind in (OutputKind.LEFT, OutputKind.RETURNED) and value is not None and storages(value) & memory:
            return f"{output.kind.value} {output.fqn!r} shares memory with a parameter"
    for item, node in zip(update.inputs, update.module.graph.find_nodes(op="placeholder"), strict=True):
        if item.kind is not InputKind.GRADIENT:
            continue
        if item.fqn not in gradients or item.fqn not in stored:
            return f"{item.fqn!r} has several gradients, which must be added first"
        if is_written(node):
            return f"the update writes the gradient of {item.fqn!r}"
        gradient = gradients[item.fqn]
        if gradient.op != "call_function" or storages(gradient) & memory:
            return f"the gradient of {item.fqn!r} shares memory with a parameter"
        parameter = stored[item.fqn].meta["val"]
        if not (parameter.is_contiguous() or _is_laid_out_as(gradient, parameter)):
            return f"the gradient of {item.fqn!r} is laid out otherwise than the parameter"
    return ""


def _find_shared(graph: TrainGraph, updated: Collection[str]) -> tuple[str, str] | None:
    """Returns a parameter that is updated, and another input of its memory, as ``a.data = b.data`` leaves them."""
    by_memory: dict[Any, list[str]] = defaultdict(list)
    for item, node in zip(graph.inputs, graph.placeholders, strict=True):
        for memory in storages(node) if item.is_state else ():
            by_memory[memory].append(item.fqn)
    for fqns in by_memory.values():
        fqn = next((each for each in fqns if each in updated), None)
        other = next((each for each in fqns if each != fqn), None)
        if fqn is not None and other is not None:
            return fqn, other
    return None


def _is_laid_out_as(gradient: fx.Node, parameter: torch.Tensor) -> bool:
    value: torch.Tensor = gradient.meta["val"]
    strides = zip(value.shape, value.stride(), parameter.stride(), strict=True)
    return all(mine == its for size, mine, its in strides if size != 1)


def _made_by(graph: TrainGraph, gradients: Nodes) -> Nodes:
    """Returns the calls after which gradients have their numbers: the last that write them, as hooks may."""
    calls = ((node, storages(*written_inputs(node))) for node in graph.graph.nodes)
    writes = {memory: node for node, written in calls for memory in written}
    return {
        fqn: max([gradient, *(writes[memory] for memory in storages(gradient) & writes.keys())])
        for fqn, gradient in gradients.items()
    }


def _lay_out(graph: TrainGraph, stored: Nodes, gradients: Nodes) -> Nodes:
    """Copies gradients that are laid out otherwise than their parameters, as autograd does before it keeps them."""
    copies, made_by = {}, _made_by(graph, gradients)
    for fqn, gradient in gradients.items():
        if not _is_laid_out_as(gradient, stored[fqn].meta["val"]):
            with graph.graph.inserting_before(made_by[fqn].next):
                contiguous = {"memory_format": torch.contiguous_format}
                copies[gradient] = graph.emit(torch.ops.aten.clone.default, (gradient,), contiguous, like=gradient)
    graph.replace_outputs(copies)
    return {fqn: copies.get(gradient, gradient) for fqn, gradient in gradients.items()}


def _plan(graph: TrainGraph, stored: Nodes, gradients: Nodes, num_bytes: int) -> list[tuple[list[str], fx.Node]]:
    """Returns the parameters that are updated together, and the call after which they are."""
    anchors = {fqn: max([made, *last_reads(stored[fqn])]) for fqn, made in _made_by(graph, gradients).items()}
    groups: list[list[str]] = [[]]
    for fqn in sorted(anchors, key=anchors.__getitem__):
        groups[-1].append(fqn)
        if sum(_size(graph, each) for each in groups[-1]) >= num_bytes:
            groups.append([])
    return [(group, anchors[group[-1]]) for group in groups if group]


def _size(graph: TrainGraph, fqn: str) -> int:
    """Returns the bytes of a parameter on one rank, as all ranks compute them."""
    info = graph.parameters[fqn]
    return math.prod(info.shape) * info.dtype.itemsize // max(len(info.shard_ranks), 1)


@dataclass
class _Emitter:
    """Puts parts of an update into a step's graph."""

    graph: TrainGraph
    update: Update
    owners: Mapping[fx.Node, Any]  # the parameter for which each call of the update computes
    # By the update's nodes those of the step; what all parameters share is made once.
    made: dict[fx.Node, fx.Node]
    # By a call of the update that returns several values, where each is among those of the last call made.
    places: dict[fx.Node, dict[int, int]] = field(default_factory=dict)

    def emit(self, fqns: Collection[str], anchor: fx.Node) -> None:
        """Emits the update of some parameters after the last call that reads them, or makes a gradient of theirs."""
        with self.graph.graph.inserting_before(anchor.next):
            for node in self.update.module.graph.nodes:
                owner = self.owners.get(node)
                if node.op in ("placeholder", "output") or (owner is None and node in self.made):
                    continue
                if node.op == "get_attr":
                    self.made[node] = self._constant(node)
                elif isinstance(owner, list):
                    self._emit_part(node, [index for index, fqn in enumerate(owner) if fqn in fqns], anchor)
                elif node.target is operator.getitem and owner in fqns:
                    source, index = node.args
                    args = (self.made[source], self.places[source][index])
                    self.made[node] = self.graph.emit(operator.getitem, args, like=anchor)
                elif owner is None or owner in fqns:
                    self._emit_call(node, node.args, node.kwargs, anchor)

    def _emit_part(self, node: fx.Node, kept: list[int], like: fx.Node) -> None:
        """Emits a call on some elements of its lists."""

        def part(value: Any) -> Any:
            return [value[index] for index in kept] if isinstance(value, (list, tuple)) and value else value

        if kept:
            self.places[node] = {index: place for place, index in enumerate(kept)}
            kwargs = {name: part(value) for name, value in node.kwargs.items()}
            self._emit_call(node, tuple(map(part, node.args)), kwargs, like)

    def _emit_call(self, node: fx.Node, args: Any, kwargs: Any, like: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((args, kwargs), self.made.__getitem__)
        self.made[node] = self.graph.emit(node.target, tuple(args), kwargs, like=like)  # type: ignore[arg-type]

    def _constant(self, node: fx.Node) -> fx.Node:
        name = f"update{node.target}"
        setattr(self.graph.module, name, getattr(self.update.module, str(node.target)))
        made = self.graph.graph.create_node("get_attr", name)
        made.meta.update(node.meta)
        return made


def _add_inputs(graph: TrainGraph, update: Update, stored: Nodes, gradients: Nodes) -> dict[fx.Node, fx.Node]:
    """Adds the optimizer's inputs to a step; returns the step's nodes of all inputs of the update."""
    made: dict[fx.Node, fx.Node] = {}
    for item, node in zip(update.inputs, update.module.graph.find_nodes(op="placeholder"), strict=True):
        if item.kind is InputKind.PARAMETER:
            made[node] = stored[item.fqn]
        elif item.kind is InputKind.GRADIENT:
            made[node] = gradients[item.fqn]
        else:
            made[node] = add_update_input(graph, item, node)
    return made


@dataclass(frozen=True)
class UpdateInBackward(GraphPass):
    """Updates each parameter as soon as its gradient is there.

    Of the update, which runs after the graph, each parameter's part moves to where its gradient is there and nothing
    reads the parameter any more. A step that runs does not return gradients then, which are dead once used::

          weight = parameter('weight')  # f32[2, 2]
          batch_0 = batch('batch[0]')  # f32[3, 2]
        + lr_of_group_0 = hyperparameter('group 0', 'lr')  # zuf0
          t = aten.t(weight)  # f32[2, 2]
          mm = aten.mm(batch_0, t)  # f32[3, 2]
          sum = aten.sum(mm)  # f32[]
          ones_like = aten.ones_like(sum, pin_memory=False, memory_format=torch.preserve_format)  # f32[]
          # backward
          expand = aten.expand(ones_like, [3, 2])  # f32[3, 2]
          t_1 = aten.t(expand)  # f32[2, 3]
          mm_1 = aten.mm(t_1, batch_0)  # f32[2, 2]
          t_2 = aten.t(mm_1)  # f32[2, 2]
          t_3 = aten.t(t_2)  # f32[2, 2]
        + neg = operator.neg(lr_of_group_0)  # -zuf0
        + foreach_add = aten._foreach_add_.List([weight], [t_3], alpha=neg)
          return sum, t_3  # loss, gradient of weight

    Lists of parameters are cut: what an operator does with an element of its lists does not depend on the others. A
    step stays as it is that clips, or whose update needs several parameters at once, or writes gradients.

    Args:
        num_bytes: parameters are updated together, in the order in which their gradients come, once these are as
            many bytes on one rank: each update has calls of its own.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> step = graphpasses.capture_train_step(
        ...     lambda model, x: model(x).sum(), model, torch.ones(2, 2), optimizer=optimizer
        ... )
        >>> graphpasses.Pipeline((UpdateInBackward(num_bytes=1),)).run(step).report.passes[0].num_rewrites
        2
    """

    name = "update-in-backward"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP})
    runs_after = frozenset({"coalesce-grad-reductions", "bucket-fsdp-collectives"})

    num_bytes: int = 2**22

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of parts in which it is updated."""
        update = graph.update
        if update is None or update.is_in_step:
            return 0
        stored = dict(graph.parameter_placeholders())
        found = {fqn: [*nodes.values()] for fqn, nodes in graph.gradients().items()}
        gradients: Nodes = {fqn: nodes[0] for fqn, nodes in found.items() if len(nodes) == 1}
        if reason := _reject_reason(graph, update, stored, gradients):
            graph.note(f"parameters are updated after the backward: {reason}")
            return 0
        owners = _owners_of(update)
        assert not isinstance(owners, str)
        without = graph.copy().module
        gradients = _lay_out(graph, stored, {fqn: gradients[fqn] for fqn in update.gradients})
        groups = _plan(graph, stored, gradients, self.num_bytes)
        emitter = _Emitter(graph, update, owners, _add_inputs(graph, update, stored, gradients))
        for fqns, anchor in groups:
            emitter.emit(fqns, anchor)
        graph.note_updates(gradients)
        graph.update = update.moved_into(without)
        return len(groups)
