"""What a legal graph is: small named rules, the contract, and the check between passes.

A rule that a graph breaks says how, as the end of a sentence that begins with the pass: "pass 'x' removed the loss".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from graphpasses.errors import VerificationError
from graphpasses.graph.dynamo_graph import DynamoGraph
from graphpasses.graph.known_values import summary
from graphpasses.graph.nodes import (
    METADATA_OPS,
    WAIT,
    fake_value,
    find_collectives,
    is_collective,
    writing_operators,
)
from graphpasses.graph.train_graph import GraphInput, GraphOutput, InputKind, OutputKind, Stage, TrainGraph
from graphpasses.ops.update_rows import UPDATE_ROWS

_STATE = {InputKind.PARAMETER, InputKind.BUFFER}
_INPUTS = {
    Stage.STEP: _STATE | {InputKind.BATCH, InputKind.OPTIMIZER_STATE, InputKind.HYPERPARAMETER, InputKind.UNREDUCED},
    Stage.DYNAMO: _STATE | {InputKind.VALUE},
    Stage.JOINT: _STATE | {InputKind.VALUE, InputKind.TANGENT},
    Stage.FORWARD: _STATE | {InputKind.VALUE},
    Stage.BACKWARD: _STATE | {InputKind.VALUE, InputKind.TANGENT},
}
_OUTPUTS = {
    Stage.STEP: {*OutputKind},
    Stage.DYNAMO: {OutputKind.VALUE},
    Stage.JOINT: {OutputKind.VALUE, OutputKind.GRADIENT},
    Stage.FORWARD: {OutputKind.VALUE},
    Stage.BACKWARD: {OutputKind.VALUE, OutputKind.GRADIENT},
}


@dataclass(frozen=True)
class Contract:
    """What no pass may change: what the step reads, and whose gradients it yields."""

    state: frozenset[str]  # canonical FQNs of the parameters and buffers that are inputs
    batch: tuple[str, ...]  # paths of the batch leaves, in order
    inputs: tuple[GraphInput, ...]  # what those are that are passed by their places
    outputs: tuple[GraphOutput, ...]  # likewise what is returned
    gradients: frozenset[str]  # canonical FQNs of the parameters that get a gradient
    # Operators that write an argument in place, also in the step's update, wherever that is, and what may
    # replace a part of it.
    writers: frozenset[str]

    @classmethod
    def of(cls, graph: TrainGraph) -> Contract:
        has_places = graph.fixed_signature or graph.stage is Stage.DYNAMO
        return cls(
            state=frozenset(graph.identity.canonical(item.fqn) for item in graph.inputs if item.is_state),
            batch=tuple(item.fqn for item in graph.inputs if item.kind is InputKind.BATCH),
            inputs=graph.inputs if has_places else (),
            outputs=graph.outputs if has_places else (),
            gradients=frozenset(graph.parameters) - graph.without_gradient,
            writers=writing_operators(graph.graph).union(
                () if graph.update is None else (str(UPDATE_ROWS), *writing_operators(graph.update.module.graph))
            ),
        )


@dataclass(frozen=True)
class Broken:
    """How a graph breaks a rule."""

    message: str  # what is wrong, with the graph's own names
    cause: Exception | None = None  # the exception that showed it, if one did


def _well_formed(checked: Verifier) -> Iterator[Broken]:
    """Every value is read after it was computed, every name is one node's, and fx finds the graph sound."""
    graph = checked.graph
    if not checked.is_changed:
        return
    try:
        graph.graph.lint()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]  # then comes the whole graph
        yield Broken(f"left a malformed graph: {first_line}", error)
    if [*reversed(graph.graph.nodes)][::-1] != [*graph.graph.nodes]:
        yield Broken("left a malformed graph: a node was inserted before one that was erased")


def _described(checked: Verifier) -> Iterator[Broken]:
    """Every placeholder and every output has one description."""
    graph = checked.graph
    num_inputs, num_outputs = len(graph.placeholders), len(graph.output_values)
    if num_inputs != len(graph.inputs) or num_outputs != len(graph.outputs):
        yield Broken(
            f"left {num_inputs} placeholders and {num_outputs} outputs; the step describes "
            f"{len(graph.inputs)} and {len(graph.outputs)}"
        )


def _kinds_of_stage(checked: Verifier) -> Iterator[Broken]:
    """A graph has inputs and outputs of its stage's kinds only: a batch is a step's, a tangent a backward pass's."""
    graph = checked.graph
    stage = graph.stage
    for item in graph.inputs:
        if item.kind not in _INPUTS[stage]:
            yield Broken(f"left the {item.kind.value} input {item.fqn}; a {stage.value} graph has none")
    for index, output in enumerate(graph.outputs):
        if output.kind not in _OUTPUTS[stage]:
            yield Broken(f"left a {output.kind.value} as output {index}; a {stage.value} graph has none")


def _operators(checked: Verifier) -> Iterator[Broken]:
    """After Dynamo a graph calls operators, neither methods nor modules."""
    for op in ("call_method", "call_module") if checked.graph.stage is not Stage.DYNAMO else ():
        for node in checked.graph.graph.find_nodes(op=op):
            yield Broken(f"left {node.name}, a {op}, in a {checked.graph.stage.value} graph, which calls operators")


def _live_inputs(checked: Verifier) -> Iterator[Broken]:
    """Each input of what Dynamo traced has its live value, which the compiled model is given."""
    graph = checked.graph
    if graph.stage is Stage.DYNAMO and len(live := DynamoGraph.of(graph).live) != len(graph.inputs):
        yield Broken(f"left {len(live)} live values for {len(graph.inputs)} inputs; add them with add_input")


def _loss(checked: Verifier) -> Iterator[Broken]:
    """A step that returns a loss keeps it."""
    graph = checked.graph
    for item, value in zip(graph.outputs, graph.output_values, strict=True):
        if item.is_loss and value is None:
            yield Broken("removed the loss")


def _same_inputs(checked: Verifier) -> Iterator[Broken]:
    """The step reads the parameters and buffers that it read when it was captured."""
    yield from _changes("inputs", checked.contract.state, checked.now.state)


def _same_batch(checked: Verifier) -> Iterator[Broken]:
    """The step reads the same leaves of the batch, in their order."""
    before, after = checked.contract.batch, checked.now.batch
    yield from _changes("batch inputs", frozenset(before), frozenset(after))
    if before != after:
        yield Broken(
            f"changed the step's batch inputs: expected the order {', '.join(before)}, got {', '.join(after)}"
        )


def _same_gradients(checked: Verifier) -> Iterator[Broken]:
    """The same parameters get a gradient."""
    yield from _changes("gradients", checked.contract.gradients, checked.now.gradients)


def _changes(what: str, before: frozenset[str], after: frozenset[str]) -> Iterator[Broken]:
    changes = [
        f"{verb} {', '.join(sorted(names))}"
        for verb, names in (("lost", before - after), ("gained", after - before))
        if names
    ]
    if changes:
        yield Broken(f"changed the step's {what}: {'; '.join(changes)}")


def _fixed_signature(checked: Verifier) -> Iterator[Broken]:
    """Flat inputs that another runner passes are neither removed nor added, nor called others, as outputs are not."""
    before, after = checked.contract, checked.now
    num_before, num_after = len(before.inputs), len(after.inputs)
    if checked.graph.fixed_signature and num_before != num_after:
        yield Broken(
            f"left {num_after} placeholders of {num_before}; another runner passes them all (fixed_signature)"
        )
    for kind in ("inputs", "outputs"):
        pairs = enumerate(zip(getattr(before, kind), getattr(after, kind), strict=False))
        if (wrong := next(((index, *pair) for index, pair in pairs if pair[0] != pair[1]), None)) is not None:
            index, one, two = wrong
            yield Broken(
                f"says of {kind[:-1]} {index} that it is {two.kind.value} {two.fqn!r}, which is {one.kind.value} "
                f"{one.fqn!r}; these go by their places"
            )


def _gradient_like_parameter(checked: Verifier) -> Iterator[Broken]:
    """A gradient has the shape and the device of the parameter that gets it, and its dtype or ``grad_dtype``."""
    graph = checked.graph
    stored = {fqn: placeholder.meta["val"] for fqn, placeholder in graph.parameter_placeholders()}
    for fqn, found in graph.gradients().items():
        for value in found.values():
            if fqn not in stored or value.meta.get("val") is None:
                continue
            dtype = graph.parameters[fqn].grad_dtype
            like = stored[fqn] if dtype is None else stored[fqn].to(dtype)
            expected, got = summary(like), summary(value.meta["val"])
            if expected != got and not _are_alike(like, value.meta["val"]):
                yield Broken(f"left {value.name} as the gradient of {fqn!r}: expected {expected}, got {got}")


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are alike by what was guarded: a channel count of a chunk may be an expression."""
    same = (one.dtype, one.device) == (other.dtype, other.device)
    return same and statically_known_true(sym_eq(one.shape, other.shape))


def _one_wait(checked: Verifier) -> Iterator[Broken]:
    """A collective has one reader of its values, its wait, which may be in what runs after a backward graph."""
    output = checked.graph.graph.output_node() if checked.graph.stage is Stage.BACKWARD else None
    for node in find_collectives(checked.graph.graph):
        num_waits = sum(user.target == WAIT for user in node.users)
        num_others = sum(user.target != WAIT and user.target not in METADATA_OPS for user in node.users)
        if (num_waits != 1 or num_others) and [*node.users] != [output]:
            yield Broken(
                f"left collective {node.name} with {num_waits} waits and {num_others} other users; "
                "expected exactly one wait"
            )


def _wait_of_collective(checked: Verifier) -> Iterator[Broken]:
    """A wait waits for a collective, or again for what one brought, as in traces of a tensor that is used twice."""
    for node in checked.graph.graph.find_nodes(op="call_function", target=WAIT, sort=False):
        launch = node.args[0]
        while isinstance(launch, fx.Node) and launch.target == WAIT:
            launch = launch.args[0]
        before = "placeholder" if checked.graph.stage is Stage.BACKWARD else None  # what its first half launched
        if not (isinstance(launch, fx.Node) and (is_collective(launch) or launch.op == before)):
            yield Broken(f"left {node.name} waiting for {node.args[0]}, not a collective")


def _no_new_writes(checked: Verifier) -> Iterator[Broken]:
    """A pass adds no operator that writes in place to a step or a joint graph."""
    stage, added = checked.graph.stage, checked.now.writers - checked.contract.writers
    if added and stage in (Stage.STEP, Stage.JOINT):
        yield Broken(
            f"left {', '.join(sorted(added))} writing in place, which a {stage.value} graph did not do before"
        )


def _true_values(checked: Verifier) -> Iterator[Broken]:
    """``meta["val"]`` has the shape, the dtype and the device of what the call computes."""
    for node in checked.known.unknown(checked.graph.graph) if checked.is_changed else ():
        yield from _wrong_value(node)
        checked.known.record(node)


def _wrong_value(node: fx.Node) -> Iterator[Broken]:
    try:
        actual = summary(fake_value(node))
    except Exception as error:
        yield Broken(f"left {node.name}, which cannot run on its inputs: {type(error).__name__}: {error}", error)
        return
    claimed = summary(node.meta.get("val"))
    if "val" not in node.meta and actual is not None:  # tracers give no value to calls that return none
        yield Broken(f"left {node.name} without meta['val']; make nodes with TrainGraph.emit")
    elif actual != claimed:
        yield Broken(f"left {node.name} with meta['val'] {claimed}; it computes {actual}")


# Yields how a graph breaks it; its docstring says the rule.
Rule = Callable[["Verifier"], Iterator[Broken]]

# What holds before dead code is removed.
FORM: tuple[Rule, ...] = (_well_formed,)

RULES: tuple[Rule, ...] = (
    _described,
    _loss,
    _same_inputs,
    _same_batch,
    _same_gradients,
    _fixed_signature,
    _gradient_like_parameter,
    _kinds_of_stage,
    _operators,
    _live_inputs,
    _one_wait,
    _wait_of_collective,
    _no_new_writes,
    _true_values,
)


class Verifier:
    """Checks a graph after each pass of a pipeline; what it holds before the passes is taken as true.

    Rules look at what the graph fulfilled then, ``contract``, and the values that need no check, ``known``.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.contract = Contract.of(graph)
        self.known = graph.watch_values()
        self._left: tuple[list[fx.Node], list[str]] = [], []
        self.is_changed = True  # whether the nodes are others than after the last check

    @cached_property
    def now(self) -> Contract:
        """What the graph fulfils now."""
        return Contract.of(self.graph)

    def check_form(self, pass_name: str) -> None:
        """Raises if the graph is malformed, dead code included."""
        graph = self.graph.graph
        same_nodes = len(graph.nodes) == len(self._left[0]) and self._left == self._named_nodes()
        self.is_changed = not same_nodes or bool(self.known.changed(graph))
        self._check(FORM, pass_name)

    def check_rules(self, pass_name: str) -> None:
        """Raises if a well-formed graph without dead code breaks a rule of its stage."""
        self._check(RULES, pass_name)
        if self.is_changed:
            self._left = self._named_nodes()

    def _named_nodes(self) -> tuple[list[fx.Node], list[str]]:
        nodes = [*self.graph.graph.nodes]
        return nodes, [node.name for node in nodes]

    def _check(self, rules: Sequence[Rule], pass_name: str) -> None:
        vars(self).pop("now", None)
        for rule in rules:
            for broken in rule(self):
                raise VerificationError(f"{pass_name} {broken.message}") from broken.cause
