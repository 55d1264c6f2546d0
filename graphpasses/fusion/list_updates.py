"""Optimizers' operators on lists of tensors: those that follow each other run as one kernel that writes in place.

Roots stay eager's, whose bits no kernel has: each parameter's kernel calls it, and what the root makes lasts no
longer than that parameter's update.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphpasses._torch.exact_kernels import Kernel, compile_exactly, fused_multiply_add
from graphpasses.analysis.effects import nodes_in
from graphpasses.fusion.adversarial import find_difference
from graphpasses.graph.nodes import freeze, storages
from graphpasses.ops.eager_sqrt import EAGER_SQRT

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
        run = runs[-1]
        is_of_root = node.target is operator.getitem and node.args[0] in run
        if is_update(node) or is_of_root or (run and _is_root(node)):
            run.append(node)
        elif run and (not needed[node].isdisjoint(run) or _is_large(node)):
            runs.append([])
    whole = [part for run in runs for part in _whole(run)]
    return [tuple(run) for run in whole if len(run) > 1 and _is_apart(run)]


def _is_root(node: fx.Node) -> bool:
    if node.target is not _ROOTS or not all(user.target is operator.getitem for user in node.users):
        return False
    given: Any = node.args[0]
    return all(_lie_alike([each]) for each in given) and all(map(is_update, _readers(node)))


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
    updates = Updates.of(run)
    written = updates.outputs
    others = set(updates.inputs).difference(written)
    memory = storages(*written)
    return len(memory) == len(written) and memory.isdisjoint(storages(*others))


_Call = tuple[Any, tuple[Any, ...]]  # an operator of one parameter, and its arguments: the first is what it makes


@dataclass(frozen=True)
class Column:
    """What a run of updates does with one parameter."""

    tensors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]  # those that depend on data
    calls: tuple[_Call, ...]  # of operators of :data:`UPDATES`, and of roots

    @classmethod
    def of(cls, calls: Sequence[_Call]) -> Column:
        made = {args[0] for target, args in calls if target is _ROOTS}
        read = dict.fromkeys(each for _, args in calls for each in args if isinstance(each, fx.Node))
        tensors = (each for each in read if _is_tensor(each) and each not in made)
        return cls(tuple(tensors), tuple(each for each in read if not _is_tensor(each)), tuple(calls))

    @property
    def written(self) -> list[fx.Node]:
        targets = {args[0] for _, args in self.calls}
        return [each for each in self.tensors if each in targets]

    def key(self) -> Hashable:
        """Returns what columns have in common that compute the same on as many elements."""
        nodes = dict.fromkeys((*self.tensors, *self.numbers, *(args[0] for _, args in self.calls)))
        number = {node: index for index, node in enumerate(nodes)}
        calls = [
            (str(target), freeze(fx.node.map_arg(args, lambda each: ("value", number[each]))))
            for target, args in self.calls
        ]
        return *calls, len(self.tensors), len(self.numbers), self.tensors[0].meta["val"].numel()

    def compile(self) -> Kernel:
        """Compiles it for flat tensors, and one of numbers."""
        sizes = [self.tensors[0].meta["val"].numel()] * len(self.tensors)
        return compile_exactly(self._run_exactly, [*map(torch.empty, (*sizes, len(self.numbers)))])

    def run(self, kernel: Kernel, given: Mapping[fx.Node, Any]) -> None:
        """Runs a kernel of it; each number is rounded, as eager's are."""
        numbers = torch.tensor([given[each] for each in self.numbers], dtype=torch.float32, device="cpu")
        kernel([*(given[each].view(-1) for each in self.tensors), numbers])

    def _run_exactly(self, *given: torch.Tensor) -> list[torch.Tensor]:
        *tensors, numbers = given
        memory = dict(zip(self.tensors, tensors, strict=True))
        values = memory | {node: numbers[index] for index, node in enumerate(self.numbers)}
        for target, args in self.calls:
            if target is _ROOTS:
                made, source = args
                if source in memory:  # it is read where it is stored, and needs no other place
                    values[source] = memory[source].copy_(values[source])
                values[made] = EAGER_SQRT(values[source])
                continue
            known = [
                values[each] if isinstance(each, fx.Node) else torch.scalar_tensor(each, dtype=torch.float32)
                for each in args
            ]
            values[args[0]] = UPDATES[target](*(each.expand_as(known[0]) for each in known))
        for node in self.written:
            memory[node].copy_(values[node])
        return []


@dataclass(frozen=True)
class Updates:
    """What a run of updates does: each parameter by itself."""

    nodes: tuple[fx.Node, ...]
    columns: tuple[Column, ...]
    has_fixed_sizes = True

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Updates:
        by_tensor: dict[fx.Node, list[_Call]] = {}
        for target, args in _calls(nodes):
            tensors: list[Any] = [*filter(_is_tensor, args)]
            known = {id(by_tensor[each]): by_tensor[each] for each in tensors if each in by_tensor}
            calls = [call for earlier in known.values() for call in earlier]
            calls.append((target, args))
            by_tensor |= {each: calls for _, given in calls for each in given if _is_tensor(each)}
        unique = {id(calls): calls for calls in by_tensor.values()}
        return cls(tuple(nodes), tuple(map(Column.of, unique.values())))

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
        return tuple(node for column in self.columns for node in column.written)


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


class UpdateKernels(nn.Module):
    """A run of updates as one kernel for each parameter."""

    def __init__(self, updates: Updates, kernels: Mapping[Hashable, Kernel]) -> None:
        super().__init__()
        self._inputs = updates.inputs
        self._columns = [(column, kernels[column.key()]) for column in updates.columns]

    def forward(self, *inputs: Any) -> None:
        given = dict(zip(self._inputs, inputs, strict=True))
        for column, kernel in self._columns:
            column.run(kernel, given)
