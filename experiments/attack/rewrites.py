"""Random rewrites of a step, wrong and right: what mutants have, and what is almost right, which proofs must tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from experiments.attack.expressions import ELSEWHERE, IDENTITIES, LAWS, emit
from experiments.mutants.edits import Copy, Edit, calls
from experiments.mutants.effect_mutators import EFFECT_MUTATORS
from experiments.mutants.mutators import VALUE_MUTATORS
from graphpasses._torch.schemas import draws, schemas, writes_arguments
from graphpasses.graph import TrainGraph, is_collective
from graphpasses.graph.nodes import freeze, storages
from graphpasses.passes import DeduplicateShared, UpdateInBackward

aten = torch.ops.aten

_CREATES = (aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default)


@dataclass(frozen=True)
class Rewrite(Edit):
    """A rewrite.

    Args:
        is_right: whether it is known to keep all bits, but for payloads of NaNs.
    """

    is_right: bool = False


class _Facts:
    """What decides whether a rewrite is right."""

    def __init__(self, graph: TrainGraph) -> None:
        self.position = {node: index for index, node in enumerate(graph.graph.nodes)}
        self.writes = {node for node in calls(graph) if writes_arguments(node.target)}
        self.written = {each for node in self.writes for arg in node.all_input_nodes for each in storages(arg)}

    def is_pure(self, node: fx.Node) -> bool:
        is_sent = any(map(is_collective, (node, *node.all_input_nodes)))  # and not there before it is waited for
        return node.op == "call_function" and node not in self.writes and not draws(node) and not is_sent

    def is_calm(self, node: fx.Node) -> bool:
        """Whether a call is a function of its inputs, and nothing that it reads or returns is ever written."""
        near = (node, *node.all_input_nodes)
        return self.is_pure(node) and all(self.written.isdisjoint(storages(each)) for each in near)


def _rewrite(kind: str, text: str, apply: Any, *args: Any, is_right: bool = False) -> Rewrite:
    return Rewrite(kind, text, lambda copy: apply(copy, *args), is_right=is_right)


def _erase(copy: Copy, node: fx.Node) -> None:
    copy.graph.graph.erase_node(copy[node])


def _become(copy: Copy, node: fx.Node, text: str, **values: Any) -> None:
    """Puts the value of an expression in the place of a call."""
    given = {name: fx.node.map_arg(value, copy.__getitem__) for name, value in values.items()}
    copy[node].replace_all_uses_with(emit(copy, copy[node], text, node, **given))
    _erase(copy, node)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def identities(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A value passes through calls that give it back, or almost."""

    def insert(copy: Copy, node: fx.Node, text: str) -> None:
        users = list(copy[node].users)
        value = emit(copy, copy[node].next, text, node, x=copy[node])
        for user in users:
            user.replace_input_with(copy[node], value)

    for node in calls(graph):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.users:
            is_plain = facts.is_calm(node) and value.is_contiguous() and value.storage_offset() == 0
            for is_right, text in IDENTITIES.items():
                right = is_right and is_plain and _is_float(node)
                for each in map(str.strip, text.strip().splitlines()):
                    yield _rewrite("identity", f"{node}: {each}", insert, node, each, is_right=right)


def laws(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call is other calls, or is done on moved arguments: right for some dtypes, numbers and places."""

    def become(copy: Copy, node: fx.Node, text: str) -> None:
        _become(copy, node, text, **dict(zip("abcd", (*node.args, 0), strict=False)))

    for node in calls(graph):
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        for line in LAWS.strip().splitlines():
            operator, _, texts = line.partition(": ")
            for text in texts.split(" | ") if operator == name else ():
                yield _rewrite("law", f"{node} is {text}", become, node, text)
        values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
        if all(isinstance(each, Tensor) and each.shape == node.meta["val"].shape for each in values):
            for text in ELSEWHERE.strip().splitlines():
                yield _rewrite("elsewhere", f"{node} is {text}", become, node, text)


def moves(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call is done sooner or later."""

    def put(copy: Copy, node: fx.Node, place: fx.Node) -> None:
        copy[place].prepend(copy[node])

    nodes = list(graph.graph.nodes)
    for node in calls(graph):
        here = facts.position[node]
        first = max([len(graph.inputs), *(facts.position[each] + 1 for each in node.all_input_nodes)])
        last = min([len(nodes) - 1, *(facts.position[each] for each in node.users)])
        for place in sorted({first, last, (first + here) // 2, (here + 1 + last) // 2} - {here, here + 1}):
            text = f"{node} is done before {nodes[place]}"
            yield _rewrite("move", text, put, node, nodes[place], is_right=facts.is_calm(node))


def spellings(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call says the same in other words: defaults spelled out, arguments by name."""

    def spell_out(copy: Copy, node: fx.Node) -> None:
        missing = [each for each in arguments(node)[len(node.args) :] if each.name not in node.kwargs]
        defaults = {each.name: each.default_value for each in missing if each.has_default_value()}
        copy[node].kwargs = {**copy[node].kwargs, **defaults}

    def by_name(copy: Copy, node: fx.Node) -> None:
        named = zip(arguments(node)[1:], copy[node].args[1:], strict=False)
        copy[node].kwargs = {**{each.name: value for each, value in named}, **copy[node].kwargs}
        copy[node].args = copy[node].args[:1]

    def arguments(node: fx.Node) -> Any:
        return schemas(node.target)[0].arguments

    for node in calls(graph):
        if len(schemas(node.target)) == 1:
            yield _rewrite("spelling", f"defaults of {node}", spell_out, node, is_right=True)
            if len(node.args) > 1:
                yield _rewrite("spelling", f"arguments of {node} by name", by_name, node, is_right=True)


def common_calls(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call that nothing reads is made, or erased; two equal calls become one; one becomes one for each reader."""

    def again(copy: Copy, node: fx.Node) -> None:
        with copy.graph.graph.inserting_after(copy[node]):
            copy.graph.emit_copy(copy[node], {})

    def merge(copy: Copy, one: fx.Node, other: fx.Node) -> None:
        copy.graph.merge(copy[other], copy[one])

    def recompute(copy: Copy, node: fx.Node, reader: fx.Node) -> None:
        with copy.graph.graph.inserting_before(copy[reader]):
            copy[reader].replace_input_with(copy[node], copy.graph.emit_copy(copy[node], {}))

    seen: dict[Any, fx.Node] = {}
    for node in calls(graph):
        calm, pure = facts.is_calm(node), facts.is_pure(node)
        if not node.users:
            yield _rewrite("dead code", f"{node} is erased", _erase, node, is_right=pure)
        yield _rewrite("dead code", f"{node} twice", again, node, is_right=pure)
        one = seen.setdefault((node.target, freeze(node.args), freeze(node.kwargs)), node)
        if one is not node:
            yield _rewrite("common calls", f"{node} is {one}", merge, one, node, is_right=calm)
        for reader in list(node.users)[1:]:
            yield _rewrite("common calls", f"{reader} has a {node}", recompute, node, reader, is_right=calm)


def in_place(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call writes its argument instead of a new tensor; or a new one, which may then be copied."""

    def become(copy: Copy, node: fx.Node, target: Any, text: str) -> None:
        with copy.graph.graph.inserting_before(copy[node]):
            new = copy.graph.emit(target, copy[node].args, copy[node].kwargs, like=copy[node])
        copy[node].replace_all_uses_with(emit(copy, copy[node], text, node, a=copy[node].args[0], new=new))
        _erase(copy, node)

    for node in calls(graph):
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        other = name.removesuffix("_") if name.endswith("_") else f"{name}_"
        target = getattr(getattr(aten, other, None), overload, None)
        if target is None or torch.Tag.inplace_view in target.tags:  # which changes the fake value
            continue
        for text in ("new", "copy_(a, new)") if name.endswith("_") else ("new",):
            yield _rewrite("in place", f"{node} is {other}(...): {text}", become, node, target, text)


def constants(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A number changes its sign of zero or its type, a constant is written, what follows from constants is one."""

    def give(copy: Copy, node: fx.Node, index: int, value: Any) -> None:
        copy[node].args = (*copy[node].args[:index], value, *copy[node].args[index + 1 :])

    def write(copy: Copy, node: fx.Node) -> None:
        emit(copy, copy.graph.graph.output_node(), "add_.Tensor(x, 1)", node, x=copy[node])

    def others(number: float) -> Iterator[object]:
        """Yields numbers that are equal in Python."""
        yield from (float(number), int(number)) if number == number // 1 else ()
        yield from (-0.0, 0.0, bool(number)) if number in (0, 1) else ()

    known: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for index, arg in enumerate(node.args if node.op == "call_function" else ()):
            for other in others(arg) if type(arg) in (int, float) else ():
                if other == arg and repr(other) != repr(arg):
                    yield _rewrite("constants", f"{arg!r} of {node} is {other!r}", give, node, index, other)
        if node.op == "get_attr" and _is_float(node):
            yield _rewrite("constants", f"{node} is written", write, node)
        if node.target in _CREATES or (node.all_input_nodes and known.issuperset(node.all_input_nodes)):
            known.add(node)
            for value in (0.0, -0.0, 1.0) if _is_float(node) else ():
                text = f"full(shape, {value}, dtype=dtype)"
                yield _rewrite("constants", f"{node} is {value}", _become, node, text)


def draws_more(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """Random numbers are drawn that nothing reads."""

    def draw(copy: Copy, node: fx.Node) -> None:
        emit(copy, copy[node], "rand([3], dtype=f32)", node)

    for node in calls(graph):
        if isinstance(node.meta.get("val"), Tensor):
            yield _rewrite("draws", f"numbers are drawn before {node}", draw, node)


def lost(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A gradient, or the update, is lost."""

    def lose(copy: Copy, index: int) -> None:
        copy.graph.set_output(index, None)

    for fqn, slots in graph.gradient_slots().items():
        for index in slots:
            if graph.output_values[index] is not None:
                yield _rewrite("lost", f"output {index}, of {fqn}, is lost", lose, index)
    if graph.update is not None:
        yield Rewrite("lost", "the update is lost", lambda copy: setattr(copy.graph, "update", None))


def updates(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """The optimizer's update is rewritten."""

    def update_of(graph: TrainGraph) -> TrainGraph:
        assert graph.update is not None
        return replace(graph, module=graph.update.module, inputs=graph.update.inputs, outputs=(), update=None)

    def apply(copy: Copy, edit: Edit) -> None:
        edit.rewrite(update_of(copy.graph))

    for edit in rewrites_of(update_of(graph)) if graph.update is not None else ():
        yield _rewrite("update", f"{edit.kind}, {edit.text}", apply, edit, is_right=edit.is_right)


def passes(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """The passes that need no other rank."""
    if graph.outputs:
        yield Rewrite("passes", "merge", lambda copy: DeduplicateShared().rewrite(copy.graph), is_right=True)
    if graph.update is not None:
        yield Rewrite("passes", "update", lambda copy: UpdateInBackward().rewrite(copy.graph), is_right=True)


_MAKERS = (
    identities,
    laws,
    moves,
    spellings,
    common_calls,
    in_place,
    constants,
    draws_more,
    lost,
    updates,
    passes,
)


def rewrites_of(graph: TrainGraph) -> Iterator[Rewrite]:
    """Yields all rewrites of a graph, those of ``experiments/mutants`` too, always in one order.

    Args:
        graph: a captured step.
    """
    facts = _Facts(graph)
    for make in _MAKERS:
        yield from make(graph, facts)
    for mutator in (*VALUE_MUTATORS, *EFFECT_MUTATORS):
        for edit in mutator(graph):
            if edit.rank is None:
                yield Rewrite(edit.kind, edit.text, edit.apply)
