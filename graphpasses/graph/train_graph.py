"""A graph of a training step: the FX graph, and what every flat input and output of it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings
from torch.types import py_sym_types

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.fx_graphs import copy_module
from graphpasses.errors import CaptureError
from graphpasses.graph.kinds import GraphInput, GraphOutput, InputKind, OutputKind, Stage
from graphpasses.graph.known_values import KnownValues, summary
from graphpasses.graph.nodes import fake_value, find_collectives, read_constants, storages, views
from graphpasses.graph.parameters import ParameterInfo
from graphpasses.identity import IdentityMap

if TYPE_CHECKING:
    from graphpasses.graph.pass_report import DrawnTimeline, PipelineReport
    from graphpasses.graph.update import Update

__all__ = ["GraphInput", "GraphOutput", "InputKind", "OutputKind", "Stage", "TrainGraph"]


@dataclass(repr=False)
class TrainGraph:
    """A graph of one training step, or of a part of it, that knows whose every value is.

    Passes read and rewrite ``graph``; they ask this class, never node names or node order, whose gradient a value is.
    A whole step that can be called is a :class:`~graphpasses.graph.CapturedStep`, the graph that Dynamo traced a
    :class:`~graphpasses.graph.DynamoGraph`.

    Args:
        module: the FX module; its placeholders and outputs are flat.
        inputs: what each placeholder carries.
        outputs: what each flat output carries.
        identity: the names of the model's modules, parameters and buffers.
        parameters: facts about each parameter, by canonical FQN.
        model: the live model whose parameters the step reads.
        stage: the part of the step that the graph holds.
        remembered: what passes remember from one compilation of a model to the next, e.g. what its ranks agreed on.
            All graphs of one compiled function share one dict, as do the copies of a captured step.
        told: by pass and process group, what ranks told each other of the launches, see :mod:`graphpasses.agreement`.
        place: how many graphs with collectives run before this one in a call of a compiled function, which graph
            breaks cut into several.
        fixed_signature: whether another runner owns the flat signature, so that inputs must stay.
        report: what the pipeline that made this graph did; None for a captured graph.
        timelines: orders of its nodes that a pass has played, which go to the pass's report.
        notes: what the capture or a pass has to say (a rewrite skipped, and why); the pipeline moves them to its
            report.
        seconds: how long calls were measured to take, by :func:`~graphpasses.graph.operator_seconds.describe_call`;
            None if they were not, see :func:`graphpasses.measure_operators`.
        update: what a captured step does with its gradients; None where it leaves them in ``parameter.grad``.
        written: FQNs, and paths of batch leaves, of the inputs that a step that can be called writes in place.
        runs_as: what makes of the graph's module the one that runs, e.g. with compiled kernels in it; None runs the
            graph's operators. A proof leaves all open, unless its ``axiom`` is "exact kernels", which it names.

    Example:
        >>> import torch
        >>> from graphpasses import capture_train_step
        >>> model = torch.nn.Linear(4, 1)
        >>> step = capture_train_step(lambda model, x: model(x).square().mean(), model, torch.ones(2, 4))
        >>> [item.fqn for item in step.inputs]
        ['weight', 'bias', 'batch[0]']
        >>> step.gradient_slots()
        {'weight': [1], 'bias': [2]}
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    identity: IdentityMap
    parameters: Mapping[str, ParameterInfo]
    model: nn.Module
    stage: Stage = Stage.STEP
    remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    told: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    place: int = 0
    fixed_signature: bool = False
    report: PipelineReport | None = None
    notes: list[str] = field(default_factory=list)
    timelines: list[DrawnTimeline] = field(default_factory=list, repr=False)
    update: Update | None = None
    written: frozenset[str] = frozenset()
    runs_as: Callable[[fx.GraphModule], fx.GraphModule] | None = field(default=None, repr=False, compare=False)
    seconds: Mapping[str, float] | None = field(default=None, repr=False, compare=False)
    # What its constants held when the first graph was copied with which it shares them; None if it is no copy.
    copied_constants: Mapping[str, Hashable] | None = field(default=None, repr=False, compare=False)
    _known: KnownValues = field(default_factory=KnownValues, init=False, compare=False)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.collectives().items()) or "no collectives"
        return f"{type(self).__name__}({self.stage.value}: {len(self.graph.nodes)} nodes, {counts})"

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, one per entry of ``inputs``."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def output_values(self) -> list[Any]:
        """The flat output values (nodes or None), one per entry of ``outputs``."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def set_output(self, index: int, value: fx.Node | None) -> None:
        """Replaces the flat output value at a position in ``outputs`` by a node's, or by None."""
        values = self.output_values
        values[index] = value
        self.graph.output_node().args = (values,)

    def replace_outputs(self, values: Mapping[fx.Node, fx.Node]) -> None:
        """Replaces nodes among the flat output values, all at once: fx looks at every output for each of them."""
        self.graph.output_node().args = ([values.get(value, value) for value in self.output_values],)

    def add_placeholder(self, item: GraphInput, name: str, value: Any) -> fx.Node:
        """Adds a last input that carries ``value``, a fake one; returns its placeholder."""
        with self.graph.inserting_after(self.placeholders[-1]):
            node = self.graph.placeholder(re.sub(r"\W", "_", name))
        node.target = node.name  # which fx makes unique; the generated code takes the target
        node.meta["val"] = value
        self.inputs += (item,)
        return node

    def remove_inputs(self, indices: Iterable[int]) -> None:
        """Removes placeholders that nothing reads, by their positions in ``inputs``, and their entries there."""
        gone = set(indices)
        nodes = self.placeholders
        for index in gone:
            self.graph.erase_node(nodes[index])
        self.inputs = tuple(item for index, item in enumerate(self.inputs) if index not in gone)

    def parameter_placeholders(self) -> Iterator[tuple[str, fx.Node]]:
        """Yields ``(canonical FQN, placeholder of the local tensor)``; an alias repeats its canonical FQN."""
        for item, node in zip(self.inputs, self.placeholders, strict=True):
            if item.kind is InputKind.PARAMETER and item.is_tensor:
                yield self.identity.canonical(item.fqn), node

    def gradient_slots(self) -> dict[str, list[int]]:
        """Returns, by canonical FQN, the output positions that carry its gradient's data."""
        slots: dict[str, list[int]] = {}
        for index, item in enumerate(self.outputs):
            if item.is_gradient:
                slots.setdefault(self.identity.canonical(item.fqn), []).append(index)
        return slots

    def gradients(self) -> dict[str, dict[int, fx.Node]]:
        """Returns, by canonical FQN, the nodes of its gradient by output position; of some there is none."""
        values, slots = self.output_values, self.gradient_slots()
        return {fqn: {i: values[i] for i in own if values[i] is not None} for fqn, own in slots.items()}

    def note_updates(self, fqns: Collection[str]) -> None:
        """Notes that the graph itself updates parameters by their gradients now, by canonical FQN."""
        outputs = [*self.outputs]
        for index in (index for fqn, slots in self.gradient_slots().items() if fqn in fqns for index in slots):
            outputs[index] = replace(outputs[index], is_applied=True)
        self.outputs, self.written = tuple(outputs), self.written.union(fqns)

    def applies(self, fqn: str) -> bool:
        """Whether the graph itself updates a parameter, where an output says so: else a call returns no gradient."""
        update = self.update
        return update is None or (fqn in update.in_step and (update.is_in_step or fqn not in update.gradients))

    @property
    def without_gradient(self) -> frozenset[str]:
        """Canonical FQNs of the parameters that this step leaves without a gradient."""
        found, slots = self.gradients(), self.gradient_slots()
        applied = {fqn for fqn, own in slots.items() if any(self.outputs[index].is_applied for index in own)}
        return frozenset(fqn for fqn in self.parameters if not found.get(fqn) and fqn not in applied)

    def emit(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node,
    ) -> fx.Node:
        """Inserts a call at the graph's insertion point, with ``meta["val"]`` filled in; returns the new node.

        Arguments have nodes in the place of values of the graph. Stack trace and annotations are copied from
        ``like``, a node of the same origin.
        """
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta["val"] = fake_value(node)
        if bindings := _new_symbols(node.meta["val"]):
            node.meta["unbacked_bindings"] = bindings
        self._known.record(node)
        for key in ("stack_trace", "custom", "autograd_backward", "nn_module_stack", "seq_nr"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        return node

    def emit_copy(self, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Inserts a call again at the graph's insertion point; it has the fake value and the origin of the first.

        ``values`` are nodes of equal value that the copy reads instead of those that ``node`` reads.
        """
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: values.get(read, read))
        # Not node_copy, which searches for a free name from the copied one's number on: quadratic.
        copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.meta.update(node.meta)
        if self._known.is_known(node):
            self._known.record(copy)
        return copy

    def replace(self, node: fx.Node, value: fx.Node) -> None:
        """Replaces a node by a new one that computes the same and that nothing else reads, and erases it.

        ``value`` takes over the node's fake value: its sizes keep their symbols, and it shares its storage with the
        fake values of the views that follow. Nodes must not be inserted at ``node`` now.
        """
        same = summary(node.meta.get("val")) == summary(value.meta.get("val"))
        with self._known.kept([*node.users, *[value] * same]):
            for key in ("val", "unbacked_bindings"):
                value.meta.pop(key, None)
                if key in node.meta:
                    value.meta[key] = node.meta[key]
            node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def merge(self, node: fx.Node, kept: fx.Node) -> None:
        """Replaces a node by an earlier one that has computed the same, and erases it.

        The fake value of ``kept`` stays, and views of the node become views of it. Nodes must not be inserted at
        ``node`` now.
        """
        same = summary(node.meta.get("val")) == summary(kept.meta.get("val"))
        moved = views(node) if same and storages(node) != storages(kept) else []
        with self._known.kept([*node.users, *moved] if same else []):
            node.replace_all_uses_with(kept)
            for view in moved:
                view.meta["val"] = fake_value(view)
        self.graph.erase_node(node)

    def watch_values(self) -> KnownValues:
        """Returns a record of the values that are known to be true: those of now, and what this class computes."""
        self._known = KnownValues(self.graph.nodes)
        return self._known

    def note(self, message: str) -> None:
        """Records what a user should know, e.g. a rewrite that was skipped and why, with the FQN concerned."""
        self.notes.append(message)

    def record_rewrite(self, rewrite: Callable[[Any], Any]) -> None:
        """Records the rewrite that made this graph: a step that is captured again goes through it, too."""

    def __call__(self, *batch: Any) -> Any:
        """Runs a captured step; a graph that is no whole step raises CaptureError."""
        raise CaptureError(f"a {self.stage.value} graph is run by the compiled model, not by itself")

    def copy(self) -> Self:
        """Returns a graph that can be rewritten, with its update, apart from this; tensors and model are shared."""
        return replace(
            self,
            module=copy_module(self.module),
            update=None if self.update is None else self.update.copy(),
            report=None,
            notes=[],
            timelines=[],
            told={**self.told},
            copied_constants={**read_constants(self.graph), **(self.copied_constants or {})},
        )

    def collectives(self) -> dict[str, int]:
        """Counts the collectives of the graph by operator name, e.g. ``{"all_gather_into_tensor": 3}``."""
        return dict(Counter(str(node.target).split(".")[1] for node in find_collectives(self.graph)))


def _new_symbols(value: Any) -> Any:
    """Returns where in a fake value the symbols are that it brought: sizes that depend on data."""
    if isinstance(value, py_sym_types):
        return compute_unbacked_bindings(value.node.shape_env, value)
    mode = fake_mode_of(value)
    return compute_unbacked_bindings(None if mode is None else mode.shape_env, value)


def add_update_input(graph: TrainGraph, item: GraphInput, node: fx.Node) -> fx.Node:
    """Adds an input of an update to its step, unless the step has it; returns its placeholder there."""
    placeholders = graph.placeholders
    if item in graph.inputs:
        return placeholders[graph.inputs.index(item)]
    mode = fake_mode_of([each.meta.get("val") for each in placeholders])
    assert mode is not None
    assert mode.shape_env is not None
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        with mode:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    elif isinstance(value, (torch.SymFloat, torch.SymInt)):
        shape_env, is_float = mode.shape_env, isinstance(value, torch.SymFloat)
        with shape_env.ignore_fresh_unbacked_symbols():  # an input: no call brings it
            value = shape_env.create_unbacked_symfloat() if is_float else shape_env.create_unbacked_symint()
    return graph.add_placeholder(item, f"{item.state}_of_{item.fqn}", value)
