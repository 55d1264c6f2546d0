"""Two graphs of one step, evaluated on the numbers of one table."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch import pytree
from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fake_calls import fake_call
from graphpasses._torch.fake_mode import fake_mode_of, strides_of_kernels
from graphpasses._torch.schemas import changes_memory, given_arguments, is_operator
from graphpasses.analysis.effects import (
    changes_context,
    is_check,
    is_for_effect,
    is_pythons,
    is_written,
    nodes_in,
    says_nothing,
)
from graphpasses.errors import ProofError
from graphpasses.graph import DynamoGraph, Stage, TrainGraph
from graphpasses.graph.nodes import attribute
from graphpasses.proof.bookkeeping import what_is_another
from graphpasses.proof.calls import GRADIENT
from graphpasses.proof.core.facts import Facts, leaves
from graphpasses.proof.core.values import Value
from graphpasses.proof.core.views import View
from graphpasses.proof.difference import place_of
from graphpasses.proof.evaluate import EXACT_KERNELS, Evaluation
from graphpasses.proof.evaluated import Evaluated
from graphpasses.proof.rows import RowValues
from graphpasses.proof.sizes import Sizes
from graphpasses.proof.torch_calls import TorchCalls, other_input


@dataclass(frozen=True)
class Pair:
    """What two graphs do, the second of which was made from the first."""

    values: RowValues
    sizes: Sizes
    one: Evaluated
    two: Evaluated
    updated: set[str] = field(default_factory=set)  # the names of what updates write that are in no step's graph


class FirstFacts(Facts):
    """Facts of the first of two graphs, of which no other is known whose fake values are true.

    A pass that was not proved may have left others, or have written one that all copies of the graph share. Calls of
    one operator on inputs that lie alike, in each other's memory, too, make results that lie alike: one is computed.
    Where sizes depend on data a node is believed, as to compute its value may have the compiler guard on sizes; and
    where fake tensors cannot run a call.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._asked: dict[Hashable, Any] = {}
        super().__init__(graph)

    def note_places(self, node: fx.Node) -> None:
        if is_operator(node.target) and self._are_known(node):
            self._ask(node)
        super().note_places(node)

    def _ask(self, node: fx.Node) -> None:
        said, given = self._lies(node), self.values[node]
        if not all(view is not None and view.is_known for view, _ in said[0]):
            return
        key = node.target, self.call_of(node, is_fresh=False)
        if key not in self._asked:
            try:
                self.values[node] = self._computed(node)
            except ProofError:  # it has no fake kernel here, or is given constants
                return
            self._asked[key] = self._lies(node)
            if said == self._asked[key]:
                self.values[node] = given
        elif said != self._asked[key]:
            self.values[node] = self._computed(node)
        self.origins[node] = self._asked[key][1]

    def _are_known(self, node: fx.Node) -> bool:
        """Whether all inputs are tensors that have strides, and no sizes that depend on data."""
        places = (place for each in node.all_input_nodes for place in self.places[each])
        return all(place is not None and place.view.is_known for place in places)

    def _lies(self, node: fx.Node) -> Any:
        """Returns how, where and in whose memory the tensors of a node's value lie."""
        origins = self._origins_of(node)
        return [(View.of(fake), getattr(fake, "device", None)) for fake, _ in leaves(self.values[node])], origins


def why_not_evaluated(before: TrainGraph, after: TrainGraph) -> str:
    """Returns why no rule looks into two graphs; empty where some do."""
    if before.stage is not after.stage:
        return f"it is a {after.stage.value} graph, not a {before.stage.value} graph"
    if after.runs_as is not None and getattr(after.runs_as, "axiom", None) != EXACT_KERNELS:
        return "another module than the graph's runs (runs_as), into which no rule looks"
    if name := what_is_another(before, after):
        return f"the step's {name} is another than it was, into which no rule looks"
    modules = [each.module for graph in (before, after) for each in (graph, graph.update) if each is not None]
    nodes = (node for module in modules for node in module.graph.nodes)
    reasons = (_why_no_rule(node, calls_methods=isinstance(before, DynamoGraph)) for node in nodes)
    return next(filter(None, reasons), "")


def context_set(graph: TrainGraph) -> list[str]:
    """Returns what calls of a graph's functions set for the calls after them, by their names, in order."""
    return [str(node.target) for node in graph.graph.nodes if _sets_context(node)]


def _sets_context(node: fx.Node) -> bool:
    return changes_context(node) and not is_pythons(node) and not is_check(node)


def _why_no_rule(node: fx.Node, *, calls_methods: bool) -> str:
    value = node.meta.get("val")
    if node.op == "call_module" or (node.op == "call_method" and not calls_methods):
        return f"{node.name} is a {node.op}, into which no rule looks"
    if isinstance(value, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in value):
        return f"{node.target} returns lists, into which no rule looks"
    if not calls_methods and _sets_context(node):
        return f"{node.name} sets what holds for the calls after it, into which no rule looks"
    is_plain = is_operator(node.target) or is_pythons(node) or is_check(node)
    if not calls_methods and not is_plain and says_nothing(node):
        return f"{node.name} does not say what it returns (meta['val']), and no rule looks into {node.target}"
    if calls_methods and is_for_effect(node):
        return f"nobody reads what {node.name} returns: it is called for something into which no rule looks"
    if resized := _resized(node):
        return f"{node.target} gives {resized} another shape and other memory, into which no rule looks"
    if getattr(node.target, "namespace", "") == "streams":
        return f"{node.target} orders what runs beside each other, into which no rule looks"
    if changes_memory(node.target):
        return f"{node.target} gives a tensor other memory, into which no rule looks"
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided and is_written(node):
        return f"{node.name} is written, and has no strides: no rule looks into its memory"
    return ""


def _resized(node: fx.Node) -> str:
    """Returns what a call is given to write its results into (``out=``) that has not their shapes; or nothing."""
    given = [*given_arguments(node)] if getattr(node.target, "namespace", "") == "aten" else []
    outs = [each for argument, value in given if argument.is_out for each in nodes_in(value)]
    mode = fake_mode_of([each.meta.get("val") for each in node.all_input_nodes]) if outs else None
    if mode is None:
        return ""

    def value_of(each: fx.Node) -> Any:
        return each.meta.get("val")

    def without_room(each: fx.Node) -> Any:
        value = value_of(each)
        with mode:
            return torch.empty(0, dtype=value.dtype, device=value.device)

    # What is written into may be read, too.
    named = {argument.name for argument, _ in given if argument.is_out}
    args: Any = fx.node.map_arg(node.args, value_of)
    written = {name: without_room if name in named else value_of for name in node.kwargs}
    kwargs = {name: fx.node.map_arg(value, written[name]) for name, value in node.kwargs.items()}
    made = [fake.shape for fake, _ in leaves(fake_call(mode, node.target, args, kwargs))]
    pairs = zip(outs, made, strict=False)
    return next((each.name for each, shape in pairs if each.meta["val"].shape != shape), "")


@strides_of_kernels()
def evaluate_both(subject: str, before: TrainGraph, after: TrainGraph, captured: TrainGraph | None = None) -> Pair:
    """Evaluates two graphs; ``captured`` is of what ``before`` was made, None if its own fake values are true.

    Raises:
        ProofError: the second reads other tensors than the first, says so of what goes by its place, or depends on
            chance where the first does not.
    """
    items = zip((*before.outputs, *before.inputs), (*after.outputs, *after.inputs), strict=False)
    named: Any = next((two for one, two in items if one != two), None)
    if named is not None and (before.fixed_signature or before.stage is not Stage.STEP):
        what = f"{named.kind.value} {named.fqn!r} has another place"
        raise ProofError(f"{subject} is not proved to keep anything: {what}")
    values = RowValues()
    sizes = Sizes(values, after.told)
    known: Facts = FirstFacts(before.graph if captured is None or isinstance(before, DynamoGraph) else captured.graph)
    if isinstance(before, DynamoGraph) and isinstance(after, DynamoGraph):
        if other := other_input(before, after):
            raise ProofError(f"{subject} is not proved to keep anything: input {other} is another one")
        one = TorchCalls(before, values, known, constants=after.copied_constants, sizes=sizes).run()
        sizes.begin_second()
        pair = Pair(values, sizes, one, TorchCalls(after, values, _facts_of(after, before, known), sizes=sizes).run())
    else:
        facts = known if captured is None else _facts_of(before, captured, known)
        both: Any = {"sizes": sizes, "outside": _from_outside(before, after)}
        one = Evaluation(before, values, facts, constants=after.copied_constants, **both).run()
        sizes.begin_second()
        pair = Pair(values, sizes, one, Evaluation(after, values, _facts_of(after, before, facts), **both).run())
        _evaluate_updates(before, after, pair, both["outside"])
    known_reasons = {reason for _, reason in pair.one.broken}
    for node, reason in pair.two.broken:
        if reason not in known_reasons:
            raise ProofError(f"the bits of {subject} depend on chance: {reason}\n  {place_of(node)}")
    return pair


def _facts_of(graph: TrainGraph, of: TrainGraph, known: Facts) -> Facts:
    """Returns what is known of a graph that was made of another: its inputs lie as those of that one."""
    inputs = {item: known[node] for item, node in zip(of.inputs, of.placeholders, strict=True)}
    items = zip(graph.inputs, graph.placeholders, strict=True)
    others = {
        node: item for item, node in items if item in inputs and _lies(inputs[item]) != _lies(node.meta.get("val"))
    }
    return Facts(graph.graph, known, {node: inputs[item] for node, item in others.items()})


def _lies(fake: Any) -> tuple[View | None, object]:
    return View.of(fake), getattr(fake, "device", None)


def _from_outside(before: TrainGraph, after: TrainGraph) -> frozenset[int]:
    """Returns the ids of the constants that are no literals, as others may write them.

    A step sees what is written into tensors from outside; a pass may take one in such memory for a literal.
    """
    lift = torch.ops.aten.lift_fresh_copy.default
    constants = {each: attribute(each) for each in before.graph.find_nodes(op="get_attr")}
    are_seen = before.stage is Stage.STEP
    found = [of for node, of in constants.items() if are_seen and any(user.target != lift for user in node.users)]
    known = {id(attribute(each)) for each in _constants(before)}
    new = [of for node in _constants(after) if id(of := attribute(node)) not in known]
    if new:
        held = {_memory(each) for each in _tensors([found, *_held(before)])}
        found += [each for each in _tensors(new) if _memory(each) in held]
    return frozenset(map(id, _tensors(found)))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def _constants(graph: TrainGraph) -> Iterator[fx.Node]:
    modules = [graph.module] if graph.update is None else [graph.module, graph.update.module]
    return (node for module in modules for node in module.graph.find_nodes(op="get_attr"))


def _held(graph: TrainGraph) -> Iterator[Any]:
    """Yields what the modules of a model hold, and its optimizers, in which tensors may be that others write."""
    for module in graph.model.modules():
        yield from ({**vars(module), "_modules": None}).values()
    yield [parameter.grad for parameter in graph.model.parameters()]
    for optimizer in () if graph.update is None else graph.update.optimizers.each:
        yield [*optimizer.state.values(), *optimizer.param_groups]


def _memory(tensor: torch.Tensor) -> object:
    """Returns what names the memory of a tensor; of what has no strides, itself."""
    local = local_part(tensor)
    is_plain = local.layout is torch.strided
    return StorageWeakRef(local.untyped_storage()) if is_plain else id(tensor)  # type: ignore[no-untyped-call]


def _evaluate_updates(before: TrainGraph, after: TrainGraph, pair: Pair, outside: frozenset[int]) -> None:
    known: tuple[TrainGraph, Facts] | None = None
    held = None if after.update is None else after.update.copied_constants
    for graph, done in ((before, pair.one), (after, pair.two)):
        if (update := _update_of(graph, pair.two)) is not None:
            facts = FirstFacts(update.graph) if known is None else _facts_of(update, *known)
            known = update, facts
            given = _given_to(graph, pair.two) | done.written
            constants = held if graph is before else None
            then = Evaluation(update, pair.values, facts, given, constants, done, outside=outside).run()
            pair.updated.update(done.go_on(then))


def _update_of(graph: TrainGraph, two: Evaluated) -> TrainGraph | None:
    """Returns a step's update that is not in its own graph; None without all gradients, which is told by itself."""
    update = graph.update
    if update is None or update.is_in_step or None in _given_to(graph, two).values():
        return None
    return replace_fields(graph, module=update.module, inputs=update.inputs, outputs=update.outputs)


def _given_to(graph: TrainGraph, two: Evaluated) -> dict[str, Value | None]:
    """Returns what the update reads of the rewritten step's gradients: that they are eager's is proved beside it."""
    gradients = () if graph.update is None else graph.update.gradients
    return {f"gradient {fqn}": two.outputs.get(f"{GRADIENT}{fqn!r}") for fqn in gradients}
