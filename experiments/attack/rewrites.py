"""Random rewrites of a step, wrong and right: what mutants have, and what is almost right, which proofs must tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
from graphpasses.passes.runner import GraphPass

__all__ = ["Rewrite", "rewrites_of"]

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class Rewrite(Edit):
    """A rewrite.

    Args:
        is_right: whether it is known to keep all bits, but for payloads of NaNs.
    """

    is_right: bool = False


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]


def _packed(emit: Emit, x: fx.Node) -> fx.Node:
    value = x.meta["val"]
    front = emit(aten.zeros.default, [3], dtype=value.dtype)
    buffer = emit(aten.cat.default, [front, emit(aten.reshape.default, x, [-1])])
    part = emit(aten.slice.Tensor, buffer, 0, 3, 3 + value.numel())
    return emit(aten.view.default, part, list(value.shape))


def _through(dtype: torch.dtype) -> Callable[[Emit, fx.Node], fx.Node]:
    return lambda emit, x: emit(
        aten._to_copy.default, emit(aten._to_copy.default, x, dtype=dtype), dtype=x.meta["val"].dtype
    )


IDENTITIES: dict[str, tuple[bool, Callable[[Emit, fx.Node], fx.Node]]] = {
    "neg(neg(x))": (True, lambda emit, x: emit(aten.neg.default, emit(aten.neg.default, x))),
    "x * 1.0": (True, lambda emit, x: emit(aten.mul.Tensor, x, 1.0)),
    "x / 1": (True, lambda emit, x: emit(aten.div.Tensor, x, 1)),
    "x - 0.0": (True, lambda emit, x: emit(aten.sub.Tensor, x, 0.0)),
    "x + -0.0": (True, lambda emit, x: emit(aten.add.Tensor, x, -0.0)),
    "x + 0.0": (False, lambda emit, x: emit(aten.add.Tensor, x, 0.0)),
    "x * 2 * 0.5": (False, lambda emit, x: emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, 2.0), 0.5)),
    "x * 0.5 * 2": (False, lambda emit, x: emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, 0.5), 2.0)),
    "x * 0.1 / 0.1": (False, lambda emit, x: emit(aten.div.Tensor, emit(aten.mul.Tensor, x, 0.1), 0.1)),
    "through fp64": (True, _through(torch.float64)),
    "through fp32": (False, _through(torch.float32)),
    "through bf16": (False, _through(torch.bfloat16)),
    "through its bits": (
        True,
        lambda emit, x: emit(
            aten.view.dtype,
            emit(aten.view.dtype, x, _bits_of(x.meta["val"].dtype)),
            x.meta["val"].dtype,
        ),
    ),
    "clone": (True, lambda emit, x: emit(aten.clone.default, x)),
    "alias": (True, lambda emit, x: emit(aten.alias.default, x)),
    "_unsafe_view": (True, lambda emit, x: emit(aten._unsafe_view.default, x, list(x.meta["val"].shape))),
    "view": (True, lambda emit, x: emit(aten.view.default, x, list(x.meta["val"].shape))),
    "flat and back": (
        True,
        lambda emit, x: emit(
            aten.reshape.default, emit(aten.reshape.default, x, [-1]), list(x.meta["val"].shape)
        ),
    ),
    "unsqueeze, squeeze": (
        True,
        lambda emit, x: emit(aten.squeeze.dim, emit(aten.unsqueeze.default, x, 0), 0),
    ),
    "cat of one": (True, lambda emit, x: emit(aten.cat.default, [x])),
    "stack, select": (True, lambda emit, x: emit(aten.select.int, emit(aten.stack.default, [x]), 0, 0)),
    "pad, slice": (
        False,
        lambda emit, x: emit(
            aten.slice.Tensor, emit(aten.constant_pad_nd.default, x, [0, 1]), -1, 0, x.meta["val"].shape[-1]
        ),
    ),
    "packed at an odd offset": (False, _packed),
    "x + 0 * x": (False, lambda emit, x: emit(aten.add.Tensor, x, emit(aten.mul.Tensor, x, 0.0))),
    "where(x == x, x, 0)": (
        False,
        lambda emit, x: emit(
            aten.where.self, emit(aten.eq.Tensor, x, x), x, emit(aten.zeros_like.default, x)
        ),
    ),
    "maximum(x, x)": (True, lambda emit, x: emit(aten.maximum.default, x, x)),
    "abs": (False, lambda emit, x: emit(aten.abs.default, x)),
    "sum of one": (
        False,
        lambda emit, x: emit(aten.sum.dim_IntList, emit(aten.unsqueeze.default, x, 0), [0]),
    ),
    "flip twice": (
        True,
        lambda emit, x: emit(aten.flip.default, emit(aten.flip.default, x, [0]), [0]),
    ),
}
"""What gives a float tensor back, or almost: whether all bits, and the calls."""

_VIEWS = {
    "clone": lambda emit, x, shape: emit(aten.clone.default, emit(aten.view.default, x, shape)),
    "view": lambda emit, x, shape: emit(aten.view.default, x, shape),
    "_unsafe_view": lambda emit, x, shape: emit(aten._unsafe_view.default, x, shape),
    "reshape": lambda emit, x, shape: emit(aten.reshape.default, x, shape),
}
_COPIES = (
    aten.clone.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)
_LISTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
_CREATES = (aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default)


class _Facts:
    """What decides whether a rewrite is right."""

    def __init__(self, graph: TrainGraph) -> None:
        self.nodes = list(graph.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
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


def _emit_before(copy: Copy, place: fx.Node, like: fx.Node) -> Emit:
    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with copy.graph.graph.inserting_before(place):
            return copy.graph.emit(target, args, kwargs, like=like)

    return emit


def _instead(node: fx.Node, make: Callable[[Emit, fx.Node], fx.Node]) -> Callable[[Copy], None]:
    """Puts what is made of a value in the place of the value, for all that read it."""

    def apply(copy: Copy) -> None:
        kept = copy[node]
        users = list(kept.users)
        value = make(_emit_before(copy, kept.next, kept), kept)
        for user in users:
            user.replace_input_with(kept, value)

    return apply


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def identities(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A value passes through calls that give it back, or almost."""
    for node in calls(graph):
        if not _is_float(node) or not node.users:
            continue
        value = node.meta["val"]
        is_plain = facts.is_calm(node) and value.is_contiguous() and value.storage_offset() == 0
        for name, (is_right, make) in IDENTITIES.items():
            right = is_right and is_plain or name == "alias"
            yield Rewrite("identity", f"{node}: {name}", _instead(node, make), is_right=right)


def other_copies(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A copy becomes a view, a view a copy, or another kind of it; or it is taken out."""
    for node in calls(graph):
        if node.target not in _COPIES or not isinstance(node.meta.get("val"), Tensor):
            continue
        (source, *_), shape = node.all_input_nodes, list(node.meta["val"].shape)

        def remove(copy: Copy, node: fx.Node = node, source: fx.Node = source) -> None:
            copy[node].replace_all_uses_with(copy[source])
            copy.graph.graph.erase_node(copy[node])

        before, after = source.meta["val"], node.meta["val"]
        if (before.shape, before.dtype) == (after.shape, after.dtype):
            yield Rewrite("copy", f"{node} is removed", remove)
        for name, make in _VIEWS.items():

            def become(
                copy: Copy,
                node: fx.Node = node,
                source: fx.Node = source,
                make: Any = make,
                shape: Any = shape,
            ) -> None:
                value = make(_emit_before(copy, copy[node], copy[node]), copy[source], shape)
                copy[node].replace_all_uses_with(value)
                copy.graph.graph.erase_node(copy[node])

            if before.dtype == after.dtype:
                yield Rewrite("copy", f"{node} becomes {name}", become)


def moves(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call is done sooner or later."""

    def put(node: fx.Node, place: fx.Node) -> Callable[[Copy], None]:
        return lambda copy: copy[place].prepend(copy[node])

    output = facts.nodes[-1]
    for node in calls(graph):
        here = facts.position[node]
        first = 1 + max((facts.position[each] for each in node.all_input_nodes), default=-1)
        first = max(first, len(graph.inputs))
        last = min((facts.position[each] for each in node.users), default=facts.position[output])
        places = {first, last, (first + here) // 2, (here + 1 + last) // 2} - {here, here + 1}
        for place in sorted(places):
            text = f"{node} is done before {facts.nodes[place]}"
            yield Rewrite("move", text, put(node, facts.nodes[place]), is_right=facts.is_calm(node))


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


def _rewrite(kind: str, text: str, apply: Any, *args: Any, is_right: bool = False) -> Rewrite:
    return Rewrite(kind, text, lambda copy: apply(copy, *args), is_right=is_right)


def dead_code(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call that nothing reads is erased, or made."""

    def erase(copy: Copy, node: fx.Node) -> None:
        copy.graph.graph.erase_node(copy[node])

    def again(copy: Copy, node: fx.Node) -> None:
        with copy.graph.graph.inserting_after(copy[node]):
            copy.graph.emit_copy(copy[node], {})

    for node in calls(graph):
        if not node.users:
            yield _rewrite("dead code", f"{node} is erased", erase, node, is_right=facts.is_pure(node))
        yield _rewrite("dead code", f"{node} twice", again, node, is_right=facts.is_pure(node))


def common_calls(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """Two equal calls become one; one becomes one for each reader."""

    def merge(copy: Copy, one: fx.Node, other: fx.Node) -> None:
        copy.graph.merge(copy[other], copy[one])

    def recompute(copy: Copy, node: fx.Node, reader: fx.Node) -> None:
        with copy.graph.graph.inserting_before(copy[reader]):
            again = copy.graph.emit_copy(copy[node], {})
        copy[reader].replace_input_with(copy[node], again)

    seen: dict[Any, fx.Node] = {}
    for node in calls(graph):
        key = node.target, freeze(node.args), freeze(node.kwargs)
        one = seen.setdefault(key, node)
        calm = facts.is_calm(node)
        if one is not node:
            yield _rewrite("common calls", f"{node} is {one}", merge, one, node, is_right=calm)
        for reader in list(node.users)[1:]:
            text = f"{reader} reads its own {node}"
            yield _rewrite("common calls", text, recompute, node, reader, is_right=calm)


def in_place(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A call writes its argument instead of a new tensor; or the other way round."""

    def become(copy: Copy, node: fx.Node, target: Any) -> None:
        new = _emit_before(copy, copy[node], copy[node])(target, *copy[node].args, **copy[node].kwargs)
        copy[node].replace_all_uses_with(new)
        copy.graph.graph.erase_node(copy[node])

    for node in calls(graph):
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        other = name.removesuffix("_") if name.endswith("_") else f"{name}_"
        target = getattr(getattr(aten, other, None), overload or "default", None)
        if target is None or torch.Tag.inplace_view in target.tags:  # would change the fake value's shape
            continue
        if node.args and isinstance(node.args[0], fx.Node):
            yield _rewrite("in place", f"{node} is {other}", become, node, target)


def lists(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """Parts that are joined again: the whole, or the list itself is read."""

    def whole(copy: Copy, node: fx.Node, source: fx.Node) -> None:
        copy[node].replace_all_uses_with(copy[source])
        copy.graph.graph.erase_node(copy[node])

    def as_list(copy: Copy, node: fx.Node, split: fx.Node) -> None:
        copy[node].args = (copy[split], *copy[node].args[1:])

    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: Sequence[Any] = node.args[0]
        splits = {each.args[0] for each in parts if isinstance(each, fx.Node) and each.args}
        split = next(iter(splits)) if len(splits) == 1 else None
        if not isinstance(split, fx.Node) or split.target not in _LISTS:
            continue
        yield _rewrite("lists", f"{node} reads the list {split}", as_list, node, split)
        source = split.all_input_nodes[0]
        if source.meta["val"].shape == node.meta["val"].shape:
            yield _rewrite("lists", f"{node} is {source}", whole, node, source)


def constants(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """A zero changes its sign; a constant that the step holds is written; what follows from constants is ones."""

    def negate(copy: Copy, node: fx.Node, index: int) -> None:
        args = list(copy[node].args)
        args[index] = -0.0 if str(args[index]) != "-0.0" else 0.0
        copy[node].args = tuple(args)

    def fill(copy: Copy, node: fx.Node, value: float) -> None:
        fake = node.meta["val"]
        emit = _emit_before(copy, copy[node], copy[node])
        new = emit(aten.full.default, list(fake.shape), value, dtype=fake.dtype)
        copy[node].replace_all_uses_with(new)
        copy.graph.graph.erase_node(copy[node])

    def write(copy: Copy, node: fx.Node) -> None:
        _emit_before(copy, copy.graph.graph.output_node(), copy[node])(aten.add_.Tensor, copy[node], 1)

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
                yield _rewrite("constants", f"{node} is {value}", fill, node, value)


def casts(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """Of two casts one is taken out."""

    def skip(copy: Copy, node: fx.Node, source: fx.Node) -> None:
        copy[node].replace_input_with(copy[node].all_input_nodes[0], copy[source])

    for node in graph.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        first = node.all_input_nodes[0]
        if first.target == aten._to_copy.default:
            yield _rewrite("cast", f"{node} skips {first}", skip, node, first.all_input_nodes[0])


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
    if graph.update is None:
        return

    def within(edit: Edit) -> Callable[[Copy], None]:
        return lambda copy: edit.rewrite(_update_of(copy.graph))

    for edit in rewrites_of(_update_of(graph)):
        yield Rewrite("update", f"update: {edit.kind}, {edit.text}", within(edit), is_right=edit.is_right)


def _update_of(graph: TrainGraph) -> TrainGraph:
    assert graph.update is not None
    module, inputs = graph.update.module, graph.update.inputs
    return replace(graph, module=module, inputs=inputs, outputs=(), update=None)


def passes(graph: TrainGraph, facts: _Facts) -> Iterator[Rewrite]:
    """The passes that need no other rank."""

    def run(copy: Copy, each: GraphPass) -> None:
        each.rewrite(copy.graph)

    if graph.outputs:
        yield _rewrite("passes", "deduplicate-shared", run, DeduplicateShared(), is_right=True)
    if graph.update is not None:
        yield _rewrite("passes", "update-in-backward", run, UpdateInBackward(), is_right=True)


_MAKERS = (
    identities,
    other_copies,
    moves,
    spellings,
    dead_code,
    common_calls,
    in_place,
    lists,
    constants,
    casts,
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
    mutants = itertools.chain.from_iterable(mutator(graph) for mutator in (*VALUE_MUTATORS, *EFFECT_MUTATORS))
    for edit in mutants:
        yield Rewrite(edit.kind, edit.text, edit.apply)
