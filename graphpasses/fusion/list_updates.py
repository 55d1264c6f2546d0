"""Optimizers' operators on lists of tensors: those that follow each other run as one kernel that writes in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphpasses._torch.exact_kernels import Kernel, compile_exactly, fused_multiply_add
from graphpasses.analysis.effects import nodes_in
from graphpasses.fusion.adversarial import find_difference
from graphpasses.graph.nodes import freeze, storages

aten = torch.ops.aten

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
    """Returns runs of updates that nothing reads before the last of them, and between which nothing large is made."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function" and is_update(node):
            runs[-1].append(node)
        elif runs[-1] and (not needed[node].isdisjoint(runs[-1]) or _is_large(node)):
            runs.append([])
    return [tuple(run) for run in runs if len(run) > 1 and _is_apart(run)]


def _is_large(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not storages(node).isdisjoint(storages(*node.all_input_nodes)):
        return False
    return bool(value.numel() >= MIN_ELEMENTS)


def _is_apart(run: Sequence[fx.Node]) -> bool:
    """Whether what is written lies in no memory but its own."""
    read = dict.fromkeys(each for node in run for each in nodes_in(node.args) if _is_tensor(each))
    written = dict.fromkeys(each for node in run for each in nodes_in(node.args[0]))
    others = [each for each in read if each not in written]
    memory = storages(*written)
    return len(memory) == len(written) and memory.isdisjoint(storages(*others))


@dataclass(frozen=True)
class Column:
    """What a run of updates does with one parameter."""

    tensors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]  # those that depend on data
    calls: tuple[tuple[Any, tuple[Any, ...]], ...]  # operators of :data:`UPDATES`, and what they are given
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


@dataclass(frozen=True)
class Updates:
    """What a run of updates does: each parameter by itself."""

    nodes: tuple[fx.Node, ...]
    columns: tuple[Column, ...]
    has_fixed_sizes = True

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Updates:
        members = set(nodes)
        columns: dict[fx.Node, list[tuple[Any, tuple[Any, ...]]]] = {}
        for node in nodes:
            for index in range(len(node.args[0])):  # type: ignore[arg-type]
                args = tuple(each[index] if isinstance(each, (list, tuple)) else each for each in node.args)
                tensors: list[Any] = [*filter(_is_tensor, args)]
                known = {id(columns[each]): columns[each] for each in tensors if each in columns}
                calls = [call for earlier in known.values() for call in earlier]
                calls.append((node.target, args))
                columns |= {each: calls for _, given in calls for each in given if _is_tensor(each)}
        unique = {id(calls): calls for calls in columns.values()}
        return cls(tuple(nodes), tuple(_column(calls, members) for calls in unique.values()))

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
                node.target(*fx.node.map_arg(node.args, values.__getitem__))  # type: ignore[operator]

        kernel = UpdateKernels(self, kernels)
        inputs = [node.meta["val"] if _is_tensor(node) else None for node in self.inputs]
        return find_difference(lambda given: written(kernel, *given), partial(written, eager), inputs)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(each for node in self.nodes for each in nodes_in(node.args)))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(column.tensors[index] for column in self.columns for index in column.written)


def _column(calls: Sequence[tuple[Any, tuple[Any, ...]]], members: set[fx.Node]) -> Column:
    read = dict.fromkeys(each for _, args in calls for each in args if isinstance(each, fx.Node))
    tensors = [*filter(_is_tensor, read)]
    targets = {args[0] for _, args in calls}
    written = (index for index, each in enumerate(tensors) if each in targets and _is_read(each, members))
    return Column(tuple(tensors), tuple(each for each in read if not _is_tensor(each)), tuple(calls), tuple(written))


class UpdateKernels(nn.Module):
    """A run of updates as one kernel for each parameter."""

    def __init__(self, updates: Updates, kernels: Mapping[Hashable, Kernel]) -> None:
        super().__init__()
        place = {node: index for index, node in enumerate(updates.inputs)}
        self._calls = [
            (
                column,
                kernels[column.key()],
                [place[node] for node in column.tensors],
                [place[node] for node in column.numbers],
            )
            for column in updates.columns
        ]

    def forward(self, *inputs: Any) -> None:
        for column, kernel, tensors, numbers in self._calls:
            column.run(kernel, [inputs[index] for index in tensors], [inputs[index] for index in numbers])


def _is_read(tensor: fx.Node, members: set[fx.Node]) -> bool:
    """Whether anyone may read what a run leaves in a tensor: none does that nothing else knows."""
    source = tensor.all_input_nodes[0] if tensor.all_input_nodes else tensor
    is_fresh = source.target is aten._foreach_sqrt.default and tensor.op == "call_function"
    return not is_fresh or any(user not in members for user in tensor.users)
