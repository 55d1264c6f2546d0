"""Wrong rewrites of values: each mutator yields all edits of one kind that a graph has a place for."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from experiments.mutants.edits import Copy, Edit, alike, calls, insert_after, reads
from graphpasses.graph import TrainGraph, is_collective

__all__ = ["VALUE_MUTATORS"]

aten = torch.ops.aten
Mutator = Callable[[TrainGraph], Iterator[Edit]]

_UNARY = (
    aten.relu,
    aten.tanh,
    aten.sigmoid,
    aten.neg,
    aten.abs,
    aten.exp,
    aten.detach,
    aten.alias,
    aten.silu,
)
_SIBLINGS: tuple[tuple[Any, ...], ...] = (
    tuple(packet.default for packet in _UNARY),
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default),
    (aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar, aten.sub.Scalar),
    (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor),
    (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),
    (aten.sum.default, aten.mean.default, aten.max.default),
    (aten.tanh_backward.default, aten.sigmoid_backward.default, aten.mul.Tensor),
    (aten._softmax.default, aten._log_softmax.default),
    (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    (aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default),
    (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.eq.Scalar, aten.ne.Scalar),
    (aten.zeros.default, aten.ones.default),
    (aten.zeros_like.default, aten.ones_like.default, aten.clone.default),
    (aten.cat.default, aten.hstack.default),
    (torch.relu, torch.tanh, torch.sigmoid),
    (operator.add, operator.sub, operator.mul),
)
_PIECES = (
    aten.slice.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.split.Tensor,
    aten.select.int,
    aten.constant_pad_nd.default,
    aten.narrow.default,
    aten.cat.default,
    aten._chunk_cat.default,
    operator.getitem,
)


def _set(copy: Copy, node: fx.Node, index: int, value: Any) -> None:
    """Gives a call another positional argument; a node of the original stands for the copy's."""
    node = copy[node]
    args = list(node.args)
    args[index] = fx.node.map_arg(value, lambda each: copy.nodes[each.name])
    node.args = tuple(args)


def swap_operands(graph: TrainGraph) -> Iterator[Edit]:
    """A call reads two values of equal shape in the wrong order."""

    def exchange(node: fx.Node, i: int, j: int) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            one, other = node.args[i], node.args[j]
            _set(copy, node, i, other)
            _set(copy, node, j, one)

        return apply

    for node in calls(graph):
        for (i, a), (j, b) in itertools.combinations(reads(node), 2):
            if a is not b and alike(a, b):
                yield Edit("operands", f"{node}: {a} and {b} exchanged", exchange(node, i, j))


def read_another(graph: TrainGraph) -> Iterator[Edit]:
    """A call reads another value of equal shape: the last one before its own."""
    seen: dict[Any, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            for index, arg in reads(node):
                others = [each for each in seen.get(_key(arg), ()) if each is not arg and alike(each, arg)]
                for other in dict.fromkeys([*others[-1:], *others[:1]]):
                    yield Edit(
                        "inputs",
                        f"{node} reads {other} instead of {arg}",
                        lambda copy, node=node, index=index, other=other: _set(copy, node, index, other),
                    )
        seen.setdefault(_key(node), []).append(node)


def _key(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.dim(), value.dtype) if isinstance(value, torch.Tensor) else None


def swap_inputs(graph: TrainGraph) -> Iterator[Edit]:
    """Two inputs of equal shape stand for each other."""

    def exchange(one: fx.Node, other: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            a, b = copy[one], copy[other]
            swapped = {a: b, b: a}
            for user in {*a.users, *b.users}:
                user.args = fx.node.map_arg(user.args, lambda each: swapped.get(each, each))

        return apply

    for one, other in itertools.combinations(graph.placeholders, 2):
        if alike(one, other) and (one.users or other.users):
            yield Edit("inputs", f"inputs {one} and {other} exchanged", exchange(one, other))


def swap_outputs(graph: TrainGraph) -> Iterator[Edit]:
    """Two outputs of equal shape stand for each other, or one for both."""

    def give(indices: Sequence[int], values: Sequence[fx.Node]) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            for index, value in zip(indices, values, strict=True):
                copy.graph.set_output(index, copy[value])

        return apply

    outputs = [(i, value) for i, value in enumerate(graph.output_values) if isinstance(value, fx.Node)]
    for (i, a), (j, b) in itertools.combinations(outputs, 2):
        if a is not b and alike(a, b):
            yield Edit("outputs", f"outputs {i} and {j} exchanged: {a}, {b}", give((i, j), (b, a)))
            yield Edit("outputs", f"output {j} is {a}, as output {i}, instead of {b}", give((j,), (a,)))


def other_operator(graph: TrainGraph) -> Iterator[Edit]:
    """A call is one of another operator with the same arguments."""

    def become(node: fx.Node, target: Any) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            copy[node].target = target

        return apply

    for node in calls(graph):
        for siblings in _SIBLINGS:
            if node.target in siblings:
                for target in siblings:
                    if target not in (node.target, aten.detach.default, aten.alias.default):
                        yield Edit("operator", f"{node} is {target}", become(node, target))


def other_argument(graph: TrainGraph) -> Iterator[Edit]:
    """A number, a flag or a list of numbers is another; of a split, slice or pad it is a piece."""
    for node in calls(graph):
        if is_collective(node):
            continue
        kind = "pieces" if node.target in _PIECES else "arguments"
        for index, arg in enumerate(node.args):
            for other in _others(arg):
                yield Edit(
                    kind,
                    f"{node}: argument {index} is {other}, not {arg}",
                    lambda copy, node=node, index=index, other=other: _set(copy, node, index, other),
                )


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield value * 1.5 if value else 0.5
    elif isinstance(value, (list, tuple)):
        for i, j in itertools.combinations(range(len(value)), 2):
            if value[i] != value[j] and -1 not in (value[i], value[j]):
                swapped = list(value)
                swapped[i], swapped[j] = value[j], value[i]
                yield swapped
                if all(type(each) is int for each in (value[i], value[j])):
                    yield [*value[:i], value[i] + 1, *value[i + 1 : j], value[j] - 1, *value[j + 1 :]]


def shift_slice(graph: TrainGraph) -> Iterator[Edit]:
    """A slice begins and ends a row too late or too early, or is shortened and padded."""

    def shift(node: fx.Node, by: int) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            _, dim, start, end, *rest = node.args
            copy[node].args = (copy[node].args[0], dim, start + by, end + by, *rest)

        return apply

    def shorten(node: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            kept, value = copy[node], node.meta["val"]
            users = list(kept.users)
            part = copy.after(kept, aten.slice.Tensor, kept, 0, 0, value.shape[0] - 1)
            padded = copy.after(part, aten.constant_pad_nd.default, part, [0, 0] * (value.dim() - 1) + [0, 1])
            for user in users:
                user.replace_input_with(kept, padded)

        return apply

    for node in graph.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        if len(node.args) > 3 and all(isinstance(arg, int) for arg in node.args[1:4]):
            for by in (1, -1):
                yield Edit("pieces", f"{node} is shifted by {by}", shift(node, by))
    for node in calls(graph):
        value = node.meta.get("val")
        is_piece = node.target in (operator.getitem, aten.slice.Tensor)
        if is_piece and isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 1:
            yield Edit("pieces", f"{node} lacks its last row, which is zero", shorten(node))


def permute_pieces(graph: TrainGraph) -> Iterator[Edit]:
    """Two parts that are joined, or two of what was split, stand for each other."""

    def exchange_parts(node: fx.Node, i: int, j: int) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            parts = list(node.args[0])
            parts[i], parts[j] = parts[j], parts[i]
            _set(copy, node, 0, parts)

        return apply

    for node in calls(graph):
        if isinstance(node.args[:1], tuple) and node.args and isinstance(node.args[0], (list, tuple)):
            parts = node.args[0]
            for i, j in itertools.combinations(range(len(parts)), 2):
                if isinstance(parts[i], fx.Node) and isinstance(parts[j], fx.Node) and parts[i] is not parts[j]:
                    yield Edit("pieces", f"{node}: parts {i} and {j} exchanged", exchange_parts(node, i, j))
        split = [user for user in node.users if user.target is operator.getitem]
        for a, b in itertools.combinations(split, 2):
            if alike(a, b):
                yield Edit("pieces", f"{a} and {b} exchanged", _exchange_indices(a, b))


def _exchange_indices(one: fx.Node, other: fx.Node) -> Callable[[Copy], None]:
    def apply(copy: Copy) -> None:
        _set(copy, one, 1, other.args[1])
        _set(copy, other, 1, one.args[1])

    return apply


def wrong_additions(graph: TrainGraph) -> Iterator[Edit]:
    """A term is dropped or added twice; ``(a + b) + c`` is ``a + (b + c)``."""

    def drop(node: fx.Node, kept: Any) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            copy[node].replace_all_uses_with(copy[kept])

        return apply

    def double(node: fx.Node, term: fx.Node) -> Callable[[Copy], object]:
        return lambda copy: insert_after(copy, copy[node], aten.add.Tensor, copy[term])

    def reassociate(node: fx.Node, inner: fx.Node, c: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            a, b = inner.args[:2]
            with copy.graph.graph.inserting_before(copy[node]):
                last = copy.graph.emit(aten.add.Tensor, (copy[b], copy[c]), like=copy[node])
            copy[node].args = (copy[a], last)

        return apply

    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if node.kwargs or len(terms) != 2:
            continue
        for kept, gone in (terms, terms[::-1]):
            if alike(kept, node):
                yield Edit("additions", f"{node} lacks {gone}", drop(node, kept))
                yield Edit("additions", f"{node} has {gone} twice", double(node, gone))
            if kept.target is aten.add.Tensor and not kept.kwargs and len(reads(kept)) == 2:
                yield Edit("additions", f"{node}: the sum {kept} is reassociated", reassociate(node, kept, gone))


def _insert(
    graph: TrainGraph,
    kind: str,
    text: str,
    emit: Callable[[Copy, fx.Node], fx.Node],
    where: Callable[[torch.Tensor], bool] = lambda value: True,
) -> Iterator[Edit]:
    """Yields edits that put calls between a float tensor and all that read it."""

    def insert(node: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            kept = copy[node]
            users = list(kept.users)
            value = emit(copy, kept)
            for user in users:
                user.replace_input_with(kept, value)

        return apply

    for node in calls(graph):
        value = node.meta.get("val")
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and node.users and not is_collective(node) and where(value):
            yield Edit(kind, f"{node} {text}", insert(node))


def other_dtype(graph: TrainGraph) -> Iterator[Edit]:
    """A value passes through another dtype, or two are added in one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):

        def pass_through(copy: Copy, node: fx.Node, dtype: torch.dtype = dtype) -> fx.Node:
            narrow = copy.after(node, aten._to_copy.default, node, dtype=dtype)
            return copy.after(narrow, aten._to_copy.default, narrow, dtype=node.meta["val"].dtype)

        def is_other(value: torch.Tensor, dtype: torch.dtype = dtype) -> bool:
            return value.dtype is not dtype

        yield from _insert(graph, "dtype", f"passes through {dtype}", pass_through, where=is_other)

    def widen(node: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            kept, dtype = copy[node], node.meta["val"].dtype
            wide = []
            with copy.graph.graph.inserting_before(kept):
                for _, arg in reads(kept):
                    kwargs = {"dtype": torch.float32}
                    wide.append(copy.graph.emit(aten._to_copy.default, (arg,), kwargs, like=kept))
                value = copy.graph.emit(kept.target, (*wide, *kept.args[len(wide) :]), kept.kwargs, like=kept)
                value = copy.graph.emit(aten._to_copy.default, (value,), {"dtype": dtype}, like=kept)
            kept.replace_all_uses_with(value)

        return apply

    for node in calls(graph):
        value = node.meta.get("val")
        is_computed = node.target in (aten.add.Tensor, aten.mm.default, aten.addmm.default, aten.mul.Tensor)
        if is_computed and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            yield Edit("dtype", f"{node} is computed in float32", widen(node))


def other_scale(graph: TrainGraph) -> Iterator[Edit]:
    """A value is scaled: by zero, by a half, or by a factor that rounds."""
    for factor in (0.0, 0.5, 1 + 2**-8):

        def scale(copy: Copy, node: fx.Node, factor: float = factor) -> fx.Node:
            return copy.after(node, aten.mul.Tensor, node, factor)

        yield from _insert(graph, "scale", f"is scaled by {factor}", scale)


def other_strides(graph: TrainGraph) -> Iterator[Edit]:
    """A value lies in memory otherwise: a kernel may add in another order."""

    def transpose(copy: Copy, node: fx.Node) -> fx.Node:
        turned = copy.after(node, aten.transpose.int, node, 0, 1)
        dense = copy.after(turned, aten.clone.default, turned, memory_format=torch.contiguous_format)
        return copy.after(dense, aten.transpose.int, dense, 0, 1)

    def is_matrix(value: torch.Tensor) -> bool:
        return value.dim() > 1 and all(statically_known_true(size > 1) for size in value.shape[:2])

    yield from _insert(graph, "strides", "lies transposed", transpose, where=is_matrix)


VALUE_MUTATORS: tuple[Mutator, ...] = (
    swap_operands,
    read_another,
    swap_inputs,
    swap_outputs,
    other_operator,
    other_argument,
    shift_slice,
    permute_pieces,
    wrong_additions,
    other_dtype,
    other_scale,
    other_strides,
)
