"""Random rewrites of a step, wrong and right: what mutants have, and what is almost right, which proofs must tell."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from experiments.mutants.edits import Copy, Edit, calls
from experiments.mutants.effect_mutators import EFFECT_MUTATORS
from experiments.mutants.mutators import VALUE_MUTATORS
from graphpasses._torch.schemas import draws, schemas, writes_arguments
from graphpasses.graph import TrainGraph
from graphpasses.graph.nodes import freeze, storages
from graphpasses.passes import DeduplicateShared, UpdateInBackward

__all__ = ["Rewrite", "emit", "rewrites_of"]

aten = torch.ops.aten

IDENTITIES = {
    True: """
        neg(neg(x))
        mul.Tensor(x, 1.0)
        div.Tensor(x, 1)
        sub.Tensor(x, 0.0)
        add.Tensor(x, -0.0)
        maximum(x, x)
        to(to(x, dtype=f64), dtype=dtype)
        view.dtype(view.dtype(x, bits), dtype)
        clone(x)
        alias(x)
        view(x, shape)
        _unsafe_view(x, shape)
        reshape(reshape(x, [-1]), shape)
        squeeze.dim(unsqueeze(x, 0), 0)
        cat([x])
        select.int(stack([x]), 0, 0)
        flip(flip(x, [0]), [0])
        """,
    False: """
        add.Tensor(x, 0.0)
        mul.Tensor(mul.Tensor(x, 2.0), 0.5)
        mul.Tensor(mul.Tensor(x, 0.5), 2.0)
        div.Tensor(mul.Tensor(x, 0.1), 0.1)
        add.Tensor(x, mul.Tensor(x, 0.0))
        where.self(eq.Tensor(x, x), x, zeros_like(x))
        abs(x)
        sum.dim_IntList(unsqueeze(x, 0), [0])
        to(to(x, dtype=f32), dtype=dtype)
        to(to(x, dtype=f16), dtype=dtype)
        slice.Tensor(constant_pad_nd(x, [0, 1]), -1, 0, shape[-1])
        view(slice.Tensor(cat([zeros([3], dtype=dtype), view(x, [-1])]), 0, 3, 3 + numel), shape)
        """,
}
"""Calls that give a float tensor back: all bits of it, and almost."""

_SHORT = {"to": "_to_copy", "attention": "_scaled_dot_product_flash_attention_for_cpu"}
_COPIES = ("clone", "view", "_unsafe_view", "reshape", "alias", "detach", "_to_copy")
_VIEWS = ("clone(view(x, shape))", "view(x, shape)", "_unsafe_view(x, shape)", "reshape(x, shape)")
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)  # not maximum: of zeros it may return the second
_LISTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
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
        self.written = {
            each for node in self.writes for arg in node.all_input_nodes for each in storages(arg)
        }

    def is_pure(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.writes and not draws(node)

    def is_calm(self, node: fx.Node) -> bool:
        """Whether a call is a function of its inputs, and nothing that it reads or returns is ever written."""
        near = (node, *node.all_input_nodes)
        return self.is_pure(node) and all(self.written.isdisjoint(storages(each)) for each in near)


class _Calls(dict[str, Any]):
    """The names of expressions: values, facts about one, and operators of ATen, which make calls before a node."""

    def __init__(self, copy: Copy, place: fx.Node, like: Tensor, values: Mapping[str, fx.Node]) -> None:
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[like.dtype.itemsize]
        facts = {"shape": list(like.shape), "dtype": like.dtype, "numel": like.numel(), "bits": bits}
        dtypes = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        super().__init__(**values, **facts, **dtypes, getitem=_Operator(self, operator.getitem))
        self._copy, self._place = copy, place

    def __missing__(self, name: str) -> _Operator:
        return _Operator(self, getattr(aten, _SHORT.get(name, name)))

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        with self._copy.graph.graph.inserting_before(self._place):
            return self._copy.graph.emit(target, args, kwargs, like=self._place)


@dataclass(frozen=True)
class _Operator:
    calls: _Calls
    packet: Any

    def __getattr__(self, overload: str) -> _Operator:
        return _Operator(self.calls, getattr(self.packet, overload))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self.calls.emit(getattr(self.packet, "default", self.packet), args, kwargs)


def emit(copy: Copy, place: fx.Node, text: str, like: Tensor, **values: fx.Node) -> fx.Node:
    """Makes the calls of statements, before a node; the last of them is an expression, whose value is returned.

    Args:
        copy: in which the calls are made.
        place: before it.
        text: statements, between semicolons, on operators of ATen, as ``add.Tensor(x, neg(x))``.
        like: whose ``shape``, ``dtype``, ``numel`` and dtype of ``bits`` the text reads.
        values: what else the text reads.
    """
    names = _Calls(copy, place, like, values)
    *statements, last = text.split("; ")
    exec("\n".join(statements), {}, names)
    node: fx.Node = eval(last, {}, names)
    return node


def _rewrite(kind: str, text: str, apply: Any, *args: Any, is_right: bool = False) -> Rewrite:
    return Rewrite(kind, text, lambda copy: apply(copy, *args), is_right=is_right)


def _replace(copy: Copy, node: fx.Node, value: fx.Node) -> None:
    copy[node].replace_all_uses_with(value)
    copy.graph.graph.erase_node(copy[node])


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def identities(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A value passes through calls that give it back, or almost."""

    def insert(copy: Copy, node: fx.Node, expression: str) -> None:
        users = list(copy[node].users)
        value = emit(copy, copy[node].next, expression, node.meta["val"], x=copy[node])
        for user in users:
            user.replace_input_with(copy[node], value)

    for node in calls(graph):
        if not _is_float(node) or not node.users:
            continue
        value = node.meta["val"]
        is_plain = facts.is_calm(node) and value.is_contiguous() and value.storage_offset() == 0
        for is_right, text in IDENTITIES.items():
            for line in text.strip().splitlines():
                right = is_right and is_plain
                yield _rewrite(
                    "identity", f"{node}: {line.strip()}", insert, node, line.strip(), is_right=right
                )


def other_copies(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A copy becomes a view, a view a copy, or another kind of it; or it is taken out."""

    def become(copy: Copy, node: fx.Node, source: fx.Node, expression: str) -> None:
        _replace(copy, node, emit(copy, copy[node], expression, node.meta["val"], x=copy[source]))

    for node in calls(graph):
        if str(node.target).split(".")[1:2] not in [[name] for name in _COPIES]:
            continue
        source = node.all_input_nodes[0]
        if source.meta["val"].dtype == node.meta["val"].dtype:
            for expression in _VIEWS:
                yield _rewrite("copy", f"{node} becomes {expression}", become, node, source, expression)
            if source.meta["val"].shape == node.meta["val"].shape:
                yield _rewrite("copy", f"{node} is removed", become, node, source, "x")
        elif source.target == node.target == aten._to_copy.default:
            skipped = source.all_input_nodes[0]
            expression = "to(x, dtype=dtype)"
            yield _rewrite("copy", f"{node} skips {source}", become, node, skipped, expression)


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
    """A call says the same in other words: operands commuted, defaults spelled out, arguments by name."""

    def commute(copy: Copy, node: fx.Node) -> None:
        copy[node].args = copy[node].args[1::-1]

    def spell_out(copy: Copy, node: fx.Node) -> None:
        (schema,) = schemas(node.target)
        missing = [each for each in schema.arguments[len(node.args) :] if each.name not in node.kwargs]
        defaults = {each.name: each.default_value for each in missing if each.has_default_value()}
        copy[node].kwargs = {**copy[node].kwargs, **defaults}

    def by_name(copy: Copy, node: fx.Node) -> None:
        (schema,) = schemas(node.target)
        named = zip(schema.arguments[1:], copy[node].args[1:], strict=False)
        copy[node].kwargs = {**{each.name: value for each, value in named}, **copy[node].kwargs}
        copy[node].args = copy[node].args[:1]

    for node in calls(graph):
        if len(schemas(node.target)) != 1:
            continue
        if node.target in _COMMUTATIVE and not node.kwargs and isinstance(node.args[1], fx.Node):
            yield _rewrite("spelling", f"{node} commuted", commute, node, is_right=True)
        yield _rewrite("spelling", f"defaults of {node}", spell_out, node, is_right=True)
        if len(node.args) > 1:
            yield _rewrite("spelling", f"arguments of {node} by name", by_name, node, is_right=True)


def common_calls(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call that nothing reads is made, or erased; two equal calls become one; one becomes one for each reader."""

    def erase(copy: Copy, node: fx.Node) -> None:
        copy.graph.graph.erase_node(copy[node])

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
            yield _rewrite("dead code", f"{node} is erased", erase, node, is_right=pure)
        yield _rewrite("dead code", f"{node} twice", again, node, is_right=pure)
        one = seen.setdefault((node.target, freeze(node.args), freeze(node.kwargs)), node)
        if one is not node:
            yield _rewrite("common calls", f"{node} is {one}", merge, one, node, is_right=calm)
        for reader in list(node.users)[1:]:
            yield _rewrite("common calls", f"{reader} has a {node}", recompute, node, reader, is_right=calm)


def in_place(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call writes its argument instead of a new tensor; or the other way round."""

    def become(copy: Copy, node: fx.Node, target: Any) -> None:
        with copy.graph.graph.inserting_before(copy[node]):
            new = copy.graph.emit(target, copy[node].args, copy[node].kwargs, like=copy[node])
        _replace(copy, node, new)

    for node in calls(graph):
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        other = name.removesuffix("_") if name.endswith("_") else f"{name}_"
        target = getattr(getattr(aten, other, None), overload, None)
        if target is not None and torch.Tag.inplace_view not in target.tags:  # which changes the fake value
            yield _rewrite("in place", f"{node} is {other}", become, node, target)


def lists(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """Parts that are joined again: the whole, or the list itself is read."""

    def as_list(copy: Copy, node: fx.Node, split: fx.Node) -> None:
        copy[node].args = (copy[split], *copy[node].args[1:])

    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        sources = {each.args[0] for each in node.all_input_nodes if each.args}
        split = sources.pop() if len(sources) == 1 else None
        if isinstance(split, fx.Node) and split.target in _LISTS:
            whole = split.all_input_nodes[0]
            yield _rewrite("lists", f"{node} reads the list {split}", as_list, node, split)
            yield Rewrite(
                "lists",
                f"{node} is {whole}",
                lambda copy, node=node, whole=whole: _replace(copy, node, copy[whole]),
            )


def constants(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A zero changes its sign; a constant that the step holds is written; what follows from constants is one."""

    def negate(copy: Copy, node: fx.Node, index: int) -> None:
        args = list(copy[node].args)
        args[index] = 0.0 if str(args[index]) == "-0.0" else -0.0
        copy[node].args = tuple(args)

    def become(copy: Copy, node: fx.Node, value: float) -> None:
        text = f"full(shape, {value}, dtype=dtype)"
        _replace(copy, node, emit(copy, copy[node], text, node.meta["val"]))

    def write(copy: Copy, node: fx.Node) -> None:
        emit(copy, copy.graph.graph.output_node(), "add_.Tensor(x, 1)", node.meta["val"], x=copy[node])

    known: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for index, arg in enumerate(node.args):
            if type(arg) in (int, float) and arg == 0 and node.op == "call_function":
                yield _rewrite("constants", f"argument {index} of {node} negated", negate, node, index)
        if node.op == "get_attr" and _is_float(node):
            yield _rewrite("constants", f"{node} is written", write, node)
        if node.target in _CREATES or (node.all_input_nodes and known.issuperset(node.all_input_nodes)):
            known.add(node)
            for value in (0.0, -0.0, 1.0) if _is_float(node) else ():
                yield _rewrite("constants", f"{node} is {value}", become, node, value)


def lost(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A gradient, or the update, is lost."""
    for fqn, slots in graph.gradient_slots().items():
        for index in slots:
            if graph.output_values[index] is not None:
                text = f"output {index}, of {fqn}, is lost"
                yield Rewrite("lost", text, lambda copy, index=index: copy.graph.set_output(index, None))
    if graph.update is not None:
        yield Rewrite("lost", "the update is lost", lambda copy: setattr(copy.graph, "update", None))


def updates(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """The optimizer's update is rewritten."""

    def update_of(graph: TrainGraph) -> TrainGraph:
        assert graph.update is not None
        return replace(graph, module=graph.update.module, inputs=graph.update.inputs, outputs=(), update=None)

    for edit in rewrites_of(update_of(graph)) if graph.update is not None else ():
        text = f"{edit.kind}, {edit.text}"
        yield Rewrite(
            "update",
            text,
            lambda copy, edit=edit: edit.rewrite(update_of(copy.graph)),
            is_right=edit.is_right,
        )


def passes(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """The passes that need no other rank."""
    if graph.outputs:
        yield Rewrite("passes", "merge", lambda copy: DeduplicateShared().rewrite(copy.graph), is_right=True)
    if graph.update is not None:
        yield Rewrite(
            "passes", "update early", lambda copy: UpdateInBackward().rewrite(copy.graph), is_right=True
        )


_MAKERS = (
    *(identities, other_copies, moves, spellings, common_calls, in_place),
    *(lists, constants, lost, updates, passes),
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
            yield Rewrite(edit.kind, edit.text, edit.apply)
