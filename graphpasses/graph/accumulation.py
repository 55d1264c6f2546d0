"""A captured step whose gradients wait for a later step's reduction, or that reduces what has waited with its own.

A step is captured with its reductions. Of the same capture other graphs are cut: one whose gradients leave it where
their reduction begins, and one that adds to them there what FSDP2 keeps of earlier backwards.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor, local_part
from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.fsdp2_accumulation import Accumulators, reducing
from graphpasses._torch.fsdp2_tracing import Reductions
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses._torch.operator_facts import writes_first
from graphpasses._torch.operator_recorder import recording_paused
from graphpasses.errors import CaptureError
from graphpasses.graph.kinds import GraphInput, GraphOutput, InputKind, OutputKind
from graphpasses.graph.nodes import eliminate_dead_code, fake_value, reach, refresh_values
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.update import Update
from graphpasses.identity import IdentityMap

aten = torch.ops.aten
S = TypeVar("S")


@dataclass(frozen=True)
class Waiting:
    """What one call finds: places, as FQNs and ``"group 0"``, whose gradients wait; on all ranks one text."""

    kept: tuple[str, ...] = ()  # whose gradients this call leaves unreduced
    # Whose earlier ones it reduces with its own, and their dtypes.
    pending: tuple[tuple[str, torch.dtype], ...] = ()
    # Of those kept, which are the first to wait and have several uses, whose gradients FSDP2 adds in which dtype.
    widened: tuple[tuple[str, torch.dtype], ...] = ()

    def __str__(self) -> str:
        pending = (f"{place} ({dtype})" for place, dtype in self.pending)
        widened = f"; widened: {self.widened}" if self.widened else ""
        return f"to wait: {', '.join(self.kept) or 'none'}; to be reduced: {', '.join(pending) or 'none'}{widened}"


CutGraph = tuple[fx.GraphModule, tuple[GraphInput, ...], tuple[GraphOutput, ...]]
"""A graph that was cut of a step's, and what its flat inputs and outputs are."""


@dataclass(frozen=True, eq=False)
class Marks:
    """Where a step's gradients are about to be reduced: views that nothing else reads."""

    names: dict[str, str]  # by place, of the view's node
    placements: dict[str, Any]  # by place, of a gradient that is a DTensor
    # Parameters of groups that may reduce before all gradients are there: what has waited is reduced by itself.
    late: set[str]
    # Of parameters with several uses, the nodes that add the gradients of these, in order, in the dtype of compute.
    added: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor], reductions: Reductions) -> tuple[Marks, list[torch.Tensor]]:
        """Returns the marks of a trace, and what is marked; parameters are by FQN, each under its first."""
        first = {parameter: fqn for fqn, parameter in [*named.items()][::-1]}
        unreduced = {first[parameter]: found for parameter, found in reductions.unreduced.items()}
        marks = {fqn: mark for fqn, (mark, _) in unreduced.items()}
        marks |= {f"group {index}": each[0] for index, each in reductions.partly_reduced.items() if len(each) == 1}
        placements = {fqn: each for fqn, (_, each) in unreduced.items() if each is not None}
        late = {first[parameter] for parameter in reductions.late}
        return cls(dict.fromkeys(marks, ""), placements, late), [*marks.values()]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where a step can be cut, in its graph as it was captured."""

    module: fx.GraphModule  # the graph, with the marks in it
    marks: Marks
    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[GraphOutput, ...] = ()
    update: Update | None = None  # as it was captured

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which the step computes what may wait, by place."""
        values = {node.name: node.meta["val"] for node in self.module.graph.nodes if "val" in node.meta}
        return {place: values[name].dtype for place, name in self.marks.names.items()}

    def graph_for(self, waiting: Waiting) -> CutGraph:
        """Returns the graph of a call in which gradients wait, or have waited."""
        graph = copy_graph(self.module.graph)
        nodes = {node.name: node for node in graph.nodes}
        marks = {place: nodes[name] for place, name in self.marks.names.items()}
        for place, dtype in waiting.widened:
            sums = [nodes[name] for name in self.marks.added[place]]
            marks[place].args = (_widened(graph, marks[place], sums, dtype),)
        values: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        kept = {place: marks[place] for place in waiting.kept if place in marks}
        behind = reach(kept.values(), lambda node: node.users)
        values = [None if value in behind else value for value in values]
        outputs = [*self.outputs, *(GraphOutput(OutputKind.VALUE, place) for place in kept)]
        graph.output_node().args = ([*values, *(mark.args[0] for mark in kept.values())],)
        totals = {
            place: _total(graph, marks[place], dtype, is_last=_is_group(place)) for place, dtype in waiting.pending
        }
        for place, mark in marks.items():
            mark.replace_all_uses_with(totals.get(place, mark.args[0]))
            graph.erase_node(mark)
        eliminate_dead_code(graph)
        # Of a reduction in another dtype than the gradients'.
        refresh_values(graph, totals.values())
        inputs = [*self.inputs, *(GraphInput(InputKind.UNREDUCED, place) for place in totals)]
        return lazy_module(self.module, graph), tuple(inputs), tuple(outputs)


@dataclass(eq=False)
class CutSteps(Generic[S]):
    """Steps that were cut of a captured one, each for what waits in a call of it."""

    model: nn.Module
    identity: IdentityMap
    trained: frozenset[str]  # FQNs of the parameters for which the step computes gradients
    cuts: Cuts | None
    is_updating: bool  # whether it uses these
    make: Callable[[CutGraph, Update | None], S]  # of a graph that was cut, and of an update
    _steps: dict[Waiting, S] = field(default_factory=dict)
    _agreed: set[Waiting] = field(default_factory=set)

    def __post_init__(self) -> None:
        placements = {} if self.cuts is None else self.cuts.marks.placements
        self.accumulators = Accumulators(self.model, self.identity.canonical, placements, self.trained)
        self._places = self.trained | {self.accumulators.group_of(fqn) for fqn in self.trained}

    def keeping(self) -> AbstractContextManager[None]:
        """Lets calls in the block leave all gradients unreduced; raises where none can wait."""
        is_sharded = any(isinstance(each, DTensor) for each in nn.Module.parameters(self.model))
        if not self.accumulators.groups and (is_sharded or self.is_updating):
            raise CaptureError(
                "step.accumulate leaves gradients where FSDP2 keeps them, and fully_shard was not applied to the "
                "model; capture without optimizer=, call the step for each microbatch, and update after the last"
            )
        return reducing(self.accumulators.groups, reduces=False)

    def find_waiting(self) -> tuple[Waiting, dict[str, torch.Tensor]]:
        """Returns what waits in a call now, and the gradients that have waited, by place; the same on all ranks."""
        pending = self.accumulators.pending()
        first: dict[int, str] = {}
        for place, gradient in pending.items():
            if gradient.numel() and (other := first.setdefault(gradient.data_ptr(), place)) != place:
                raise CaptureError(
                    f"the gradients of {other!r} and {place!r}, which wait in FSDP2 to be reduced, are views of one "
                    "tensor, and eager adds to both what it adds to either. Reduce the gradients of each microbatch, "
                    "or write (a + b)[None] for a[None] + b[None]"
                )
        kept = self.accumulators.kept
        waiting = Waiting(
            tuple(sorted(self._places & kept)),
            tuple((place, gradient.dtype) for place, gradient in pending.items()),
            tuple(self._widened(kept)),
        )
        if self.accumulators.groups and waiting not in self._agreed:
            RankConsensus.of_model(self.model).check_waiting(str(waiting))
            self._agreed.add(waiting)
        return waiting, pending

    def _widened(self, kept: frozenset[str]) -> Iterator[tuple[str, torch.dtype]]:
        if self.cuts is None:
            return
        for fqn in sorted(kept & self.cuts.marks.added.keys()):
            dtype = self.accumulators.dtype_of_first(fqn)
            if dtype is not None and dtype != self.cuts.dtypes[fqn]:
                yield fqn, dtype

    def fitting(self, step: S, waiting: Waiting) -> S:
        """Returns the step for what waits, ``step`` itself if nothing does; raises where it can have no such step."""
        if waiting == Waiting():
            return step
        if waiting not in self._steps:
            cuts = self._check(waiting)
            with recording_paused():
                self._steps[waiting] = self.make(cuts.graph_for(waiting), None if waiting.kept else cuts.update)
        return self._steps[waiting]

    def _check(self, waiting: Waiting) -> Cuts:
        if self.cuts is None:
            raise CaptureError(
                "gradients wait in FSDP2 to be reduced, or are to wait (set_requires_gradient_sync(False)), and the "
                "step was made of a trace, which does not say where. Reduce the gradients of each microbatch"
            )
        marks = self.cuts.marks
        pending = [place for place, _ in waiting.pending]
        for place in (*filter(_is_group, waiting.kept), *pending):
            if place not in marks.names or (place in marks.late and place in pending):
                raise CaptureError(self._why_apart(place))
        kept = {fqn for fqn in self.trained if {fqn, self.accumulators.group_of(fqn)} & set(waiting.kept)}
        if self.is_updating and kept and (reduced := sorted(self.trained - kept)):
            is_held = all(fqn in self.accumulators.parameters for fqn in reduced)
            why = "is not. Set it for the whole model" if is_held else "is in no FSDP2 group, and cannot wait there"
            raise CaptureError(
                f"the gradient of {min(kept)!r} is to wait (set_requires_gradient_sync(False)), and that of "
                f"{reduced[0]!r} {why}: the step updates both. Or capture without optimizer="
            )
        self._check_dtypes(self.cuts, dict(waiting.pending))
        return self.cuts

    def _check_dtypes(self, cuts: Cuts, pending: Mapping[str, torch.dtype]) -> None:
        """Raises where FSDP2 does up to torch 2.14: gradients of a group have one dtype, if only some waited, too."""
        of_group: dict[str, dict[torch.dtype, str]] = {}
        for fqn, dtype in {**cuts.dtypes, **pending}.items():
            if not _is_group(fqn):
                of_group.setdefault(self.accumulators.group_of(fqn), {}).setdefault(dtype, fqn)
        for place in pending:
            dtypes = of_group.get(self.accumulators.group_of(place), {})
            if len(dtypes) > 1:
                found = ", ".join(f"{dtype} of {fqn!r}" for dtype, fqn in dtypes.items())
                raise CaptureError(
                    f"gradients of some parameters of an FSDP2 group wait in the dtype of its reduction, and none of "
                    f"others ({found}): a captured step does not reduce them together, nor does FSDP2 up to torch "
                    "2.14. Let all microbatches of a step train the same parameters"
                )

    def _why_apart(self, place: str) -> str:
        if place not in self._places:
            return (
                f"FSDP2 holds a gradient of {place!r} that waits to be reduced, and the captured step computes none "
                "with which eager would reduce it. Run the last microbatch eagerly"
            )
        return (
            f"a gradient of {place!r} waits to be reduced, or is to wait, and eager FSDP2 reduces it by itself, not "
            "with the next: its module runs several times in a step. Run the last microbatch eagerly"
        )


def _is_group(place: str) -> bool:
    return place.startswith("group ")


def _widened(graph: fx.Graph, mark: fx.Node, sums: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    """Adds the gradients of a parameter's uses in another dtype, as autograd casts them and in its order."""
    wide: dict[fx.Node, fx.Node] = {}

    def made(node: fx.Node) -> fx.Node:
        node.meta["val"] = fake_value(node)
        return node

    def cast(use: fx.Node) -> fx.Node:
        return made(graph.call_function(aten._to_copy.default, (use,), {"dtype": dtype}))

    with graph.inserting_before(mark):
        for node in sums:
            casts = {each: wide.get(each) or cast(each) for each in node.all_input_nodes}
            wide[node] = made(graph.node_copy(node, casts.__getitem__))
    return wide[sums[-1]]


def _total(graph: fx.Graph, mark: fx.Node, dtype: torch.dtype, *, is_last: bool) -> fx.Node:
    """Adds a pending gradient to what a mark shows, in eager's order: the sum of a group comes after its own."""
    value = mark.args[0]
    assert isinstance(value, fx.Node)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        pending = graph.placeholder(f"pending_{mark.name}")
    fake, mode = mark.meta["val"], fake_mode_of(mark.meta["val"])
    assert mode is not None
    with mode:
        pending.meta["val"] = torch.empty_like(fake, dtype=dtype)
    with graph.inserting_before(mark):
        total = graph.call_function(aten.add.Tensor, (value, pending) if is_last else (pending, value))
    total.meta.update(mark.meta)
    total.meta["val"] = fake_value(total)
    return total


def accumulate_gradient(parameter: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> None:
    """Adds a gradient to ``parameter.grad``, or makes it that, as ``accumulate_grad.h`` does."""
    if parameter.grad is not None:
        local_part(parameter.grad).add_(gradient)
        return
    parameter.grad = as_gradient(parameter, gradient, is_shared=is_shared)


def as_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor, placements: Any = None, *, is_shared: bool
) -> torch.Tensor:
    """Returns a first gradient of a parameter as autograd keeps it; a DTensor's has its placements, or other ones."""
    local = local_part(parameter)
    if is_shared or gradient.stride() != local.stride():
        gradient = torch.empty_like(local).copy_(gradient)
    gradient = gradient.detach()  # as autograd does: of a view it is none, and can be detached in place
    if isinstance(parameter, DTensor):
        gradient = as_dtensor(gradient, parameter, placements)
    return gradient


def shared_values(values: Sequence[Any], sources: Mapping[int, Sequence[fx.Node]]) -> frozenset[int]:
    """Returns the positions of output values that autograd would copy: somebody else holds the tensor, too.

    A view that nobody else holds it keeps as it is, so that two of one tensor share their memory, as eager's do.
    Autograd accumulates a gradient as soon as it has it, at the place in its order (the ``seq_nr`` of a call, the
    highest first) of what reads the parameter, which ``sources`` has by the position of its gradient: calls of later
    places, which have still to read the tensor, hold it.
    """
    places = {
        index: max((user.meta.get("seq_nr", -1) for node in nodes for user in node.users), default=-1)
        for index, nodes in sources.items()
    }
    tensors = [_written(value) if isinstance(value, fx.Node) else None for value in values]
    held = Counter(tensors)
    for tensor in {each for each in tensors if each is not None}:
        while tensor.target is operator.getitem or getattr(tensor.target, "is_view", False):
            tensor = _written(tensor.args[0])
            held[tensor] += 1
    return frozenset(
        index
        for index, tensor in enumerate(tensors)
        if tensor is not None
        and (
            held[tensor] > 1
            or tensor.op != "call_function"
            or any(user.meta.get("seq_nr", math.inf) < places.get(index, -1) for user in tensor.users)
        )
    )


def _written(value: Any) -> fx.Node:
    """Returns the node that made a tensor, behind calls that wrote it in place."""
    while writes_first(value.target):
        value = value.args[0]
    assert isinstance(value, fx.Node)
    return value
