"""A captured training step: its FX graph, and what every flat input and output of it is."""

from __future__ import annotations

import enum
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings, rebind_unbacked

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import fake_call, fake_mode_of
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses.errors import CaptureError
from graphpasses.graph.batch import check_batch
from graphpasses.graph.gradients import accumulate_gradient, shared_values
from graphpasses.graph.parameters import ParameterInfo, find_state
from graphpasses.identity import IdentityMap

if TYPE_CHECKING:
    from graphpasses.graph.pass_report import PipelineReport

__all__ = ["GraphInput", "GraphOutput", "InputKind", "OutputKind", "Stage", "TrainGraph"]

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

_COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    ALL_TO_ALL,
    torch.ops._c10d_functional.broadcast.default,
)


class Stage(enum.Enum):
    """The part of a training step that a graph holds.

    A captured step is one ``STEP`` graph. Under ``torch.compile`` a model shows four: the ``DYNAMO`` as Dynamo traced
    it (torch-level calls, autograd still to come), the ``JOINT`` graph of forward and backward (functional ATen
    operators), and the ``FORWARD`` and ``BACKWARD`` graphs that the joint one is split into. Without gradients the
    joint graph has no backward part, and the forward graph is the joint one. A pass that talks to other ranks accepts
    no later stage than ``JOINT``: those behind it a compiler may take from its cache, on one rank and not on another.
    """

    STEP = "step"
    DYNAMO = "dynamo"
    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


class InputKind(enum.Enum):
    """What a flat graph input is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"  # the gradient of an output of the forward pass: there is none before that is over
    VALUE = "value"  # anything else: a module's unregistered tensor, a size, what forward saved


class OutputKind(enum.Enum):
    """What a flat graph output is."""

    LOSS = "loss"
    GRADIENT = "gradient"
    VALUE = "value"  # anything else: what the model returns, what backward needs


@dataclass(frozen=True)
class GraphInput:
    """What one placeholder carries.

    Args:
        kind: parameter, buffer, a leaf of the batch, or another value.
        fqn: FQN under which the tracer saw the tensor (an alias, where tensors are tied), the leaf's
            path in the batch, e.g. ``batch[0]['tokens']``, or what says best where the value comes from.
        attr: ``""`` for the tensor itself; for a DTensor, the part that this placeholder carries:
            ``"_local_tensor"`` or ``"device_mesh"``.
    """

    kind: InputKind
    fqn: str
    attr: str = ""

    @property
    def is_state(self) -> bool:
        """Whether the placeholder carries a parameter or buffer, or a part of one."""
        return self.kind in (InputKind.PARAMETER, InputKind.BUFFER)

    @property
    def is_tensor(self) -> bool:
        """Whether the placeholder carries tensor data (not a device mesh)."""
        return self.attr in ("", "_local_tensor")


@dataclass(frozen=True)
class GraphOutput:
    """What one flat output carries: the loss, the gradient of ``fqn``, or another value.

    Args:
        kind: loss, gradient or another value.
        fqn: FQN of the parameter whose gradient it is, as the tracer saw it; empty for the loss.
        attr: as in :class:`GraphInput`.
    """

    kind: OutputKind
    fqn: str = ""
    attr: str = ""

    @property
    def is_gradient(self) -> bool:
        """Whether this slot carries gradient data (not a device mesh)."""
        return self.kind is OutputKind.GRADIENT and self.attr in ("", "_local_tensor")


@dataclass(repr=False)
class TrainGraph:
    """One training step (forward, loss and backward) as a graph that knows whose every value is.

    Calling it runs the step on the live model: ``loss = step(*batch)`` returns the loss and fills (or
    accumulates into) ``parameter.grad`` as ``loss.backward()`` would, each tied parameter once. Passes read
    and rewrite ``graph``; they ask this class, never node names or node order, whose gradient a value is.

    Args:
        module: the FX module; its placeholders and outputs are flat.
        inputs: what each placeholder carries.
        outputs: what each flat output carries.
        identity: who is who in the model.
        parameters: facts about each parameter, by canonical FQN.
        model: the live model whose parameters the step reads and whose gradients it fills.
        batch_spec: pytree structure of the captured ``*batch``; None where the graph is not a ``STEP``.
        batch_leaves: for each batch leaf: its path, and a fake tensor or the plain value captured.
        stage: the part of the step that the graph holds.
        checks: what every call of the compiled model asks first, e.g. that tables still are where a pass put them;
            each raises if not. ``DYNAMO`` stage only.
        input_checks: likewise, given what the call passes for each captured input.
        live: at the ``DYNAMO`` stage, what each placeholder was given when the model was traced: the live tensor
            of the model or batch, or a number.
        fixed_signature: whether another runner owns the flat signature, so that inputs must stay.
        report: what the pipeline that made this graph did; None for a captured graph.
        notes: what a pass has to say (a rewrite skipped, and why); the pipeline moves them to its report.

    Example:
        >>> step = capture_train_step(loss_fn, model, tokens, labels)  # doctest: +SKIP
        >>> loss = step(tokens, labels)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    identity: IdentityMap
    parameters: Mapping[str, ParameterInfo]
    model: nn.Module
    batch_spec: pytree.TreeSpec | None = None
    batch_leaves: tuple[tuple[str, Any], ...] = ()
    stage: Stage = Stage.STEP
    live: tuple[Any, ...] = ()
    checks: list[Callable[[], None]] = field(default_factory=list)
    input_checks: list[Callable[[Sequence[Any]], None]] = field(default_factory=list)
    fixed_signature: bool = False
    report: PipelineReport | None = None
    notes: list[str] = field(default_factory=list)
    _known: dict[fx.Node, tuple[object, ...]] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        counts = (
            ", ".join(f"{count} {name}" for name, count in self.collectives().items()) or "no collectives"
        )
        return f"TrainGraph({self.stage.value}: {len(self.graph.nodes)} nodes, {counts})"

    # ---- what passes ask -------------------------------------------------------------------------------

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
        """Replaces one flat output value.

        Args:
            index: position in ``outputs``.
            value: the node whose value it shall be, or None for no value.
        """
        values = self.output_values
        values[index] = value
        self.graph.output_node().args = (values,)

    def replace_outputs(self, values: Mapping[fx.Node, fx.Node]) -> None:
        """Replaces flat output values, all at once: fx looks at every output for each that it replaces.

        Args:
            values: by the nodes that they replace.
        """
        self.graph.output_node().args = ([values.get(value, value) for value in self.output_values],)

    def remove_inputs(self, indices: Iterable[int]) -> None:
        """Removes placeholders that nothing reads, and their entries in ``inputs``.

        Args:
            indices: positions in ``inputs``.
        """
        gone = set(indices)
        nodes = self.placeholders
        for index in gone:
            self.graph.erase_node(nodes[index])
        self.inputs = tuple(item for index, item in enumerate(self.inputs) if index not in gone)

    def add_input(self, tensor: torch.Tensor, fqn: str) -> fx.Node:
        """Adds a placeholder that every call gives ``tensor``, behind the others; at the ``DYNAMO`` stage only.

        Args:
            tensor: a live tensor that the compiled model keeps, e.g. an arena that several tables share.
            fqn: what it is, for messages.

        Returns:
            The placeholder.
        """
        assert self.stage is Stage.DYNAMO
        placeholders = self.placeholders
        mode = fake_mode_of([node.meta.get("val") for node in placeholders])
        assert mode is not None
        with self.graph.inserting_after(placeholders[-1]):
            node = self.graph.placeholder(re.sub(r"\W", "_", fqn))
        node.target = node.name  # which fx makes unique; the generated code takes the target
        node.meta["val"] = node.meta["example_value"] = mode.from_tensor(tensor, static_shapes=True)
        self.inputs += (GraphInput(InputKind.VALUE, fqn),)
        self.live += (tensor,)
        return node

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

    @property
    def without_gradient(self) -> frozenset[str]:
        """Canonical FQNs of the parameters that this step leaves without a gradient."""
        values = self.output_values
        slots = self.gradient_slots()
        return frozenset(
            fqn
            for fqn in self.parameters
            if not any(values[index] is not None for index in slots.get(fqn, ()))
        )

    def emit(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node,
    ) -> fx.Node:
        """Inserts a call at the graph's insertion point, with ``meta["val"]`` and its origin filled in.

        Args:
            target: the operator.
            args: its arguments; nodes stand for their values.
            kwargs: its keyword arguments.
            like: a node of the same origin: stack trace and annotations are copied from it.

        Returns:
            The new node.
        """
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta["val"] = fake_value(node)
        if bindings := _new_symbols(node.meta["val"]):
            node.meta["unbacked_bindings"] = bindings
        self.mark_value_known(node)
        for key in ("stack_trace", "custom", "autograd_backward", "nn_module_stack", "seq_nr"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        return node

    def mark_value_known(self, node: fx.Node) -> None:
        """Records that ``node.meta["val"]`` is what the call computes, as it stands now.

        Args:
            node: a call.
        """
        self._known[node] = (node.target, node.args, node.kwargs, node.meta.get("val"))

    def mark_all_known(self) -> None:
        """Records that every value is what its call computes."""
        for node in self.graph.nodes:
            self.mark_value_known(node)

    def is_value_known(self, node: fx.Node) -> bool:
        """Whether the call and its value are the same objects as when they were recorded.

        Args:
            node: a call.
        """
        if node not in self._known:
            return False
        target, args, kwargs, value = self._known[node]
        return (
            args is node.args
            and value is node.meta.get("val")
            and target is node.target
            and kwargs is node.kwargs
        )

    def recorded_value(self, node: fx.Node) -> Any:
        """Returns the ``meta["val"]`` with which a node was recorded; None if it never was.

        Args:
            node: a node.
        """
        *_, value = self._known.get(node, (None,))
        return value

    def replace_equal(self, node: fx.Node, value: fx.Node) -> None:
        """Erases a node whose users shall read an equal value, so that what they compute is known as before.

        Args:
            node: the node.
            value: the node that they shall read.
        """
        users = list(node.users)
        node.replace_all_uses_with(value)
        for user in users:
            self.mark_value_known(user)
        self.graph.erase_node(node)

    def note(self, message: str) -> None:
        """Records what a user should know, e.g. a rewrite that was skipped and why.

        Args:
            message: one sentence that names the FQN concerned.
        """
        self.notes.append(message)

    def copy(self) -> TrainGraph:
        """Returns a graph that can be rewritten without changing this one; tensors and model are shared."""
        copy = replace(
            self,
            module=lazy_module(self.module, copy_graph(self.graph)),
            report=None,
            notes=[],
            checks=[*self.checks],
            input_checks=[*self.input_checks],
            _known={},
        )
        copy.mark_all_known()  # what was captured is taken as true
        return copy

    def collectives(self) -> dict[str, int]:
        """Counts the collectives of the graph by operator name.

        Returns:
            E.g. ``{"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3}``.
        """
        names = (str(node.target).split(".")[1] for node in find_collectives(self.graph))
        return dict(Counter(names))

    # ---- running ---------------------------------------------------------------------------------------

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Runs the step on the live model.

        Args:
            batch: like the captured one: same structure, shapes, dtypes and plain values.

        Returns:
            The loss (scalar tensor, without autograd history).

        Raises:
            BatchMismatchError: the batch differs from the captured one; the message names the leaf.
            CaptureError: the live model no longer has a parameter that the step reads, or the graph is not a
                whole step.
        """
        if self.batch_spec is None:
            raise CaptureError(f"a {self.stage.value} graph is run by the compiled model, not by itself")
        leaves = check_batch(batch, self.batch_spec, self.batch_leaves)
        values = self._flat_inputs(leaves)
        device = next(self.model.parameters()).device.type
        # The casts of the captured step are in its graph; autocast must not add others.
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self._accumulate(self.module(*values))

    @cached_property
    def _shared_values(self) -> frozenset[int]:
        return shared_values(self.output_values)

    def _flat_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        leaf = iter(leaves)
        for item in self.inputs:
            if item.kind is InputKind.BATCH:
                values.append(next(leaf))
                continue
            tensor = find_state(self.model, item.fqn)
            values.append(getattr(tensor, item.attr) if item.attr else tensor)
        return values

    def _accumulate(self, flat: Sequence[Any]) -> torch.Tensor:
        loss: torch.Tensor | None = None
        for index, (item, value) in enumerate(zip(self.outputs, flat, strict=True)):
            if item.kind is OutputKind.LOSS:
                loss = value
            elif item.is_gradient and value is not None:
                parameter = find_state(self.model, self.identity.canonical(item.fqn))
                accumulate_gradient(parameter, value, is_shared=index in self._shared_values)
        assert loss is not None
        return loss


def argument(node: fx.Node, index: int = 0) -> fx.Node:
    """Returns the node that is an argument of a call.

    Args:
        node: a call whose argument ``index`` is a node.
        index: position of the argument.
    """
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` launches a functional collective."""
    return node.op == "call_function" and node.target in _COLLECTIVES


def find_collectives(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that launch a functional collective, by operator.

    Args:
        graph: an FX graph.
    """
    return [
        node
        for target in _COLLECTIVES
        for node in graph.find_nodes(op="call_function", target=target, sort=False)
    ]


def _new_symbols(value: Any) -> Any:
    """Returns where in a fake value the symbols stand that it brought: sizes that depend on data."""
    mode = fake_mode_of(value)
    return compute_unbacked_bindings(None if mode is None else mode.shape_env, value)


def fake_value(node: fx.Node) -> Any:
    """Returns the fake result of a call node, computed from its inputs' ``meta["val"]``.

    Args:
        node: a ``call_function`` node.
    """
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    assert callable(node.target)
    if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]
    mode = fake_mode_of(args, kwargs)
    if mode is None:
        return node.target(*args, **kwargs)
    if "unbacked_bindings" not in node.meta:
        return fake_call(mode, node.target, args, kwargs)
    # Computed again, a size that depends on data gets a new symbol, which stands for the same size.
    assert mode.shape_env is not None
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        value = node.target(*args, **kwargs)
    rebind_unbacked(mode.shape_env, node, value)
    return value
