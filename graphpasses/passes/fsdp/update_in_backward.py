"""Update each parameter as soon as its gradient is there, so that gradients never live all at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphpasses.analysis.effects import is_written
from graphpasses.graph import CapturedStep, InputKind, Stage, TrainGraph
from graphpasses.graph.nodes import last_reads, storages
from graphpasses.graph.update import Update
from graphpasses.passes.fsdp._update_parts import Emitter, Group, add_inputs, owners_of
from graphpasses.passes.runner import GraphPass, Numerics


def _gradients(graph: TrainGraph) -> dict[str, fx.Node]:
    values = graph.output_values
    found = {
        fqn: [values[slot] for slot in slots if values[slot] is not None]
        for fqn, slots in graph.gradient_slots().items()
    }
    return {fqn: nodes[0] for fqn, nodes in found.items() if len(nodes) == 1}


def _reject_reason(graph: TrainGraph, update: Update, gradients: Mapping[str, fx.Node]) -> str:
    if update.clip_norm is not None:
        return "clipping needs all gradients at once"
    owners = owners_of(update)
    if isinstance(owners, str):
        return f"{owners} needs several parameters at once"
    stored = dict(graph.parameter_placeholders())
    if sum(1 for _ in graph.parameter_placeholders()) > len(stored):
        return "a parameter is read under several names; run deduplicate-shared"
    memory = storages(*stored.values())
    if shared := _find_shared(graph, update.gradients):
        return "{!r} and {!r} share memory".format(*shared)
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


def _lay_out(graph: TrainGraph, update: Update) -> None:
    """Copies gradients that are laid out otherwise than their parameters, as autograd does before it keeps them."""
    stored = dict(graph.parameter_placeholders())
    gradients, copies = _gradients(graph), {}
    for fqn in update.gradients:
        gradient = gradients[fqn]
        if not _is_laid_out_as(gradient, stored[fqn].meta["val"]):
            with graph.graph.inserting_before(gradient.next):
                contiguous = {"memory_format": torch.contiguous_format}
                copies[gradient] = graph.emit(torch.ops.aten.clone.default, (gradient,), contiguous, like=gradient)
    graph.replace_outputs(copies)


def _plan(graph: TrainGraph, update: Update, gradients: Mapping[str, fx.Node], num_bytes: int) -> list[Group]:
    stored = dict(graph.parameter_placeholders())
    anchors = {fqn: max([gradients[fqn], *last_reads(stored[fqn])]) for fqn in update.gradients}
    groups: list[Group] = []
    pending: list[str] = []
    for fqn in sorted(anchors, key=anchors.__getitem__):
        pending.append(fqn)
        if sum(_size(graph, each) for each in pending) >= num_bytes:
            groups.append(Group(frozenset(pending), anchors[fqn]))
            pending = []
    if pending:
        groups.append(Group(frozenset(pending), anchors[pending[-1]]))
    return groups


def _size(graph: TrainGraph, fqn: str) -> int:
    """Returns the bytes of a parameter on one rank, as all ranks compute them."""
    info = graph.parameters[fqn]
    return math.prod(info.shape) * info.dtype.itemsize // max(len(info.shard_ranks), 1)


@dataclass(frozen=True)
class UpdateInBackward(GraphPass):
    """Updates each parameter as soon as its gradient is there.

    A step that was captured with an optimizer runs the update after its graph, when all gradients are there. Each
    parameter's part of it moves to where its gradient is there and nothing reads the parameter any more. A step that
    runs does not return gradients then, which are dead once they are used::

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
    step that clips stays as it is, for clipping needs all gradients; as does one whose update needs several
    parameters at once, or writes gradients.

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
        gradients = _gradients(graph)
        if reason := _reject_reason(graph, update, gradients):
            graph.note(f"parameters are updated after the backward: {reason}")
            return 0
        owners = owners_of(update)
        assert not isinstance(owners, str)
        without = graph.copy().module
        _lay_out(graph, update)
        gradients = _gradients(graph)
        groups = _plan(graph, update, gradients, self.num_bytes)
        emitter = Emitter(graph, update, owners, add_inputs(graph, update, gradients))
        for group in groups:
            emitter.emit(group)
        updated = frozenset().union(*(group.fqns for group in groups))
        graph.outputs = tuple(
            replace(item, is_applied=True)
            if item.is_gradient and graph.identity.canonical(item.fqn) in updated
            else item
            for item in graph.outputs
        )
        if isinstance(graph, CapturedStep):
            graph.written |= updated
        graph.update = update.moved_into(without)
        return len(groups)
