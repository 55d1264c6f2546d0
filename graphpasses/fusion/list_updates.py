"""Optimizers' operators on lists of tensors: those that follow each other run as one kernel that writes in place.

Roots stay eager's, whose bits no kernel has: before and after one each parameter has a kernel, and what the root
makes lasts no longer than that parameter's update.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from graphpasses._torch.exact_kernels import Kernel, compile_exactly, fused_multiply_add
from graphpasses.analysis.effects import nodes_in
from graphpasses.fusion.adversarial import find_difference
from graphpasses.graph.nodes import freeze, storages

aten = torch.ops.aten

_ROOTS = aten._foreach_sqrt.default
MIN_ELEMENTS = 2048  # of a tensor whose kernel takes longer than a call


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    """Computes what ATen's kernel does, which multiplies and adds in one. Source: ``native/Lerp.h``."""
    near = fused_multiply_add(weight, end - x, x)
    return torch.where(weight.abs() < 0.5, near, fused_multiply_add(weight - 1, end - x, end))


_BY_NAME: dict[Any, Callable[..., Any]] = {
    aten._foreach_add_: lambda x, number: x + number,
    aten._foreach_mul_: lambda x, number: x * number,
    aten._foreach_div_: lambda x, number: x / number,
    aten._foreach_addcmul_: lambda x, a, b, number: fused_multiply_add(a * number, b, x),
    aten._foreach_addcdiv_: lambda x, a, b, number: x + a * number / b,
}
UPDATES = {
    aten._foreach_lerp_.Scalar: _lerp,
    **{each: compute for name, compute in _BY_NAME.items() for each in (name.Scalar, name.ScalarList)},
}
"""What eager computes of one element of each list: products that it adds in one rounding are fused, no others."""


def is_update(node: fx.Node) -> bool:
    """Whether a call updates float32 tensors of the CPU in place, which lie alike and apart."""
    if node.target not in UPDATES or node.kwargs or node.users:
        return False
    lists: list[Any] = [value for value in node.args if isinstance(value, (list, tuple)) and _is_tensor(value[0])]
    written = storages(*lists[0])
    others = [each for values in lists[1:] for each in values]
    is_apart = len(written) == len(lists[0]) and written.isdisjoint(storages(*others))
    return is_apart and all(_lie_alike(each) for each in zip(*lists, strict=True))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _lie_alike(nodes: Iterable[fx.Node]) -> bool:
    values = [node.meta["val"] for node in nodes]
    return all(
        value.dtype is torch.float32
        and value.device.type == "cpu"
        and value.is_contiguous()
        and value.dim() > 0
        and all(type(size) is int for size in value.shape)
        and value.shape == values[0].shape
        for value in values
    )


def plan_updates(graph: fx.Graph, needed: Mapping[fx.Node, set[fx.Node]]) -> list[tuple[fx.Node, ...]]:
    """Returns runs of updates that nothing reads before the last of them, and between which nothing large is made.

    Roots between updates, of which only these know, are part of a run.
    """
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        is_root = bool(runs[-1]) and node.op == "call_function" and (_is_root(node) or _is_of_root(node, runs[-1]))
        if node.op == "call_function" and (is_update(node) or is_root):
            runs[-1].append(node)
        elif runs[-1] and (not needed[node].isdisjoint(runs[-1]) or _is_large(node)):
            runs.append([])
    whole = [part for run in runs for part in _whole(run)]
    return [tuple(run) for run in whole if len(run) > 1 and _is_apart(run)]


def _is_root(node: fx.Node) -> bool:
    if node.target is not _ROOTS or not all(user.target is operator.getitem for user in node.users):
        return False
    given: Any = node.args[0]
    return all(_lie_alike([each]) for each in given) and all(map(is_update, _readers(node)))


def _is_of_root(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in run


def _readers(root: fx.Node) -> list[fx.Node]:
    return [reader for part in root.users for reader in part.users]


def _whole(run: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Returns a run; without its roots, and cut there, if others read one."""
    members = set(run)
    if all(members.issuperset(_readers(node)) for node in run if node.target is _ROOTS):
        return [[*run]]
    parts: list[list[fx.Node]] = [[]]
    for node in run:
        if is_update(node):
            parts[-1].append(node)
        elif parts[-1]:
            parts.append([])
    return parts


def _is_large(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not storages(node).isdisjoint(storages(*node.all_input_nodes)):
        return False
    return bool(value.numel() >= MIN_ELEMENTS)


def _is_apart(run: Sequence[fx.Node]) -> bool:
    """Whether what is written lies in no memory but its own."""
    updates = [node for node in run if node.target in UPDATES]
    read = dict.fromkeys(each for node in updates for each in nodes_in(node.args) if _is_tensor(each))
    written = dict.fromkeys(each for node in updates for each in nodes_in(node.args[0]))
    others = [each for each in read if each not in written]
    memory = storages(*written)
    return len(memory) == len(written) and memory.isdisjoint(storages(*others))


_Call = tuple[Any, tuple[Any, ...]]  # an operator of one parameter, and its arguments: the first is what it writes


@dataclass(frozen=True)
class Column:
    """What a run of updates does with one parameter, or before or after its root."""

    tensors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]  # those that depend on data
    calls: tuple[_Call, ...]  # of operators of :data:`UPDATES`
    written: tuple[int, ...]  # which of the tensors anyone may read after it

    def key(self) -> Hashable:
        """Returns what columns have in common that compute the same on as many elements."""
        number = {node: index for index, node in enumerate((*self.tensors, *self.numbers))}
        calls = [
            (str(target), freeze(fx.node.map_arg(args, lambda each: ("value", number[each]))))
            for target, args in self.calls
        ]
        return *calls, len(self.tensors), len(self.numbers), self.tensors[0].meta["val"].numel(), self.written

    def compile(self) -> Kernel:
        """Compiles it for flat tensors, and one of numbers."""
        sizes = [self.tensors[0].meta["val"].numel()] * len(self.tensors)
        return compile_exactly(self._run_exactly, [*map(torch.empty, (*sizes, len(self.numbers)))])

    def run(self, kernel: Kernel, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Runs a kernel of it; each number is rounded, as eager's are."""
        kernel([*(each.view(-1) for each in tensors), torch.tensor(numbers, dtype=torch.float32)])

    def _run_exactly(self, *given: torch.Tensor) -> list[torch.Tensor]:
        *tensors, numbers = given
        values = dict(zip(self.tensors, tensors, strict=True))
        values |= {node: numbers[index] for index, node in enumerate(self.numbers)}
        for target, args in self.calls:
            known = [
                values[each] if isinstance(each, fx.Node) else torch.scalar_tensor(each, dtype=torch.float32)
                for each in args
            ]
            values[args[0]] = UPDATES[target](*(each.expand_as(known[0]) for each in known))
        for index in self.written:
            tensors[index].copy_(values[self.tensors[index]])
        return []


class Root(NamedTuple):
    """A root between the updates of one parameter."""

    made: fx.Node
    given: fx.Node


@dataclass(frozen=True)
class Updates:
    """What a run of updates does: each parameter by itself."""

    nodes: tuple[fx.Node, ...]
    parameters: tuple[tuple[Column | Root, ...], ...]  # what is done with each, in turn
    has_fixed_sizes = True

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Updates:
        members = set(nodes)
        by_tensor: dict[fx.Node, list[_Call]] = {}
        for target, args in _calls(nodes):
            tensors: list[Any] = [*filter(_is_tensor, args)]
            known = {id(by_tensor[each]): by_tensor[each] for each in tensors if each in by_tensor}
            calls = [call for earlier in known.values() for call in earlier]
            calls.append((target, args))
            by_tensor |= {each: calls for _, given in calls for each in given if _is_tensor(each)}
        unique = {id(calls): calls for calls in by_tensor.values()}
        return cls(tuple(nodes), tuple(tuple(_in_turn(calls, members)) for calls in unique.values()))

    @property
    def columns(self) -> tuple[Column, ...]:
        """What is compiled, each by itself."""
        return tuple(part for parts in self.parameters for part in parts if isinstance(part, Column))

    def find_difference(self, kernels: Mapping[Hashable, Kernel]) -> str:
        """Returns how kernels differ from eager's operators on all kinds of numbers, or nothing."""

        def written(run: Callable[..., object], *given: Any) -> list[torch.Tensor]:
            own = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
            run(*own)
            values = dict(zip(self.inputs, own, strict=True))
            return [values[node] for node in self.outputs]

        def eager(*given: Any) -> None:
            values = dict(zip(self.inputs, given, strict=True))
            for node in self.nodes:
                args = fx.node.map_arg(node.args, values.__getitem__)
                values[node] = node.target(*args)  # type: ignore[operator]

        kernel = UpdateKernels(self, kernels)
        inputs = [node.meta["val"] if _is_tensor(node) else None for node in self.inputs]
        return find_difference(lambda given: written(kernel, *given), partial(written, eager), inputs)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        members = set(self.nodes)
        read = dict.fromkeys(each for node in self.nodes for each in nodes_in(node.args))
        return tuple(each for each in read if each not in members)

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        written = (column.tensors[index] for column in self.columns for index in column.written)
        return tuple(dict.fromkeys(written))


def _calls(nodes: Iterable[fx.Node]) -> Iterator[_Call]:
    """Yields what is done with each parameter, update by update."""
    for node in nodes:
        if node.target is _ROOTS:
            given: Any = node.args[0]
            yield from ((_ROOTS, (part, given[part.args[1]])) for part in node.users)
        elif node.target in UPDATES:
            for index in range(len(node.args[0])):  # type: ignore[arg-type]
                lists = (each if isinstance(each, (list, tuple)) else {index: each} for each in node.args)
                yield node.target, tuple(each[index] for each in lists)


def _in_turn(calls: Sequence[_Call], members: set[fx.Node]) -> Iterator[Column | Root]:
    """Yields what is done with a parameter: updates together, but for what a root needs, and the root."""
    index = next((index for index, (target, _) in enumerate(calls) if target is _ROOTS), None)
    if index is None:
        if calls:
            yield _column(calls, members)
        return
    root = Root(*calls[index][1])
    before, later = _needed(calls[:index], root.given)
    if before:
        yield _column(before, members)
    yield root
    yield from _in_turn([*later, *calls[index + 1 :]], members)


def _needed(calls: Sequence[_Call], tensor: fx.Node) -> tuple[list[_Call], list[_Call]]:
    """Returns the calls by which a tensor is made, and the others, if they may come after these."""
    needed, wanted = list[_Call](), {tensor}
    later: list[_Call] = []
    for target, args in reversed(calls):
        if args[0] in wanted:
            wanted.update(filter(_is_tensor, args))
            needed.insert(0, (target, args))
        else:
            later.insert(0, (target, args))
    written = {args[0] for _, args in needed}
    may_wait = all(written.isdisjoint(args) for _, args in later)
    return (needed, later) if may_wait else ([*calls], [])


def _column(calls: Sequence[_Call], members: set[fx.Node]) -> Column:
    read = dict.fromkeys(each for _, args in calls for each in args if isinstance(each, fx.Node))
    tensors = [*filter(_is_tensor, read)]
    targets = {args[0] for _, args in calls}
    written = (index for index, each in enumerate(tensors) if each in targets and _is_read(each, members))
    return Column(tuple(tensors), tuple(each for each in read if not _is_tensor(each)), tuple(calls), tuple(written))


class UpdateKernels(nn.Module):
    """A run of updates as one kernel for each parameter, or one before its root and one after."""

    def __init__(self, updates: Updates, kernels: Mapping[Hashable, Kernel]) -> None:
        super().__init__()
        self._inputs = updates.inputs
        self._by_parameter = [
            [(part, kernels[part.key()] if isinstance(part, Column) else None) for part in parts]
            for parts in updates.parameters
        ]

    def forward(self, *inputs: Any) -> None:
        given = dict(zip(self._inputs, inputs, strict=True))
        for parts in self._by_parameter:
            made: dict[fx.Node, torch.Tensor] = {}
            for part, kernel in parts:
                if kernel is None:
                    assert isinstance(part, Root)
                    made[part.made] = torch.sqrt(given[part.given])
                else:
                    assert isinstance(part, Column)
                    tensors = [made[each] if each in made else given[each] for each in part.tensors]
                    part.run(kernel, tensors, [given[each] for each in part.numbers])


def _is_read(tensor: fx.Node, members: set[fx.Node]) -> bool:
    """Whether anyone may read what a run leaves in a tensor: none does that nothing else knows."""
    source = tensor.all_input_nodes[0] if tensor.all_input_nodes else tensor
    is_fresh = source.target is aten._foreach_sqrt.default and tensor.op == "call_function"
    return not is_fresh or any(user not in members for user in tensor.users)
