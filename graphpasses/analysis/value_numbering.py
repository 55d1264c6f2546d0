"""Value numbering of sizes: which of the numbers in a graph's small integer tensors are the same.

TorchRec makes tensors of sizes, sends them, and reads the sizes that it receives. Every such number gets an id; the
same size has the same id, wherever it stands. A tensor is known if all its numbers are. What an operator that only
moves data does to the numbers is found by running it on a tensor of their ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpasses._torch.fake_mode import outside_tracing
from graphpasses.graph import ALL_TO_ALL, WAIT, argument
from graphpasses.graph.size_arithmetic import Size, size_expression
from graphpasses.ops.pack_all_to_all import PACK
from graphpasses.ops.size_tensor import SIZE_TENSOR

aten = torch.ops.aten
_MOVE_DATA = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.stack.default,
    aten.cat.default, aten.clone.default, aten.lift_fresh_copy.default, aten.alias.default, PACK,
}  # fmt: skip
_MAX_NUMBERS = 1 << 16


@dataclass(frozen=True)
class Received:
    """A number that an all-to-all brings: the ``index``-th that ``source`` (a rank of the group) sent here."""

    launch: fx.Node
    source: int
    index: int


class SizeNumbering:
    """The numbers in the integer tensors of a graph; ``all_numbers`` has them by id."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self.all_numbers: list[Size | Received] = []
        self._id_of: dict[Hashable, int] = {}
        self._ids: dict[fx.Node, Tensor] = {}
        self._flat: dict[fx.Node, list[int]] = {}
        with outside_tracing():
            for node in module.graph.nodes:
                ids = self._find(node)
                if ids is not None:
                    self._ids[node] = ids
                    self._flat[node] = ids.reshape(-1).tolist()

    def __contains__(self, node: fx.Node) -> bool:
        """Whether all numbers in a tensor are known."""
        return node in self._ids

    def ids(self, node: fx.Node) -> list[int]:
        """Returns the ids of the numbers in a known tensor, in order; equal ids are equal numbers."""
        return self._flat[node]

    def numbers(self, node: fx.Node) -> list[Size | Received]:
        """Returns the numbers in a known tensor, in order."""
        return [self.all_numbers[number] for number in self.ids(node)]

    def _find(self, node: fx.Node) -> Tensor | None:
        value = node.meta.get("val")
        if node.op == "get_attr":
            return self._constant(getattr(self._module, str(node.target), None))
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
            return None
        if node.target == aten.scalar_tensor.default:
            number = node.args[0]
            return torch.tensor(self._id(number), device="cpu") if isinstance(number, (int, fx.Node)) else None
        if node.target == SIZE_TENSOR:
            sizes: Sequence[Size] = node.args[0]  # type: ignore[assignment]
            return torch.tensor([self._id(size) for size in sizes], device="cpu")
        if node.target == ALL_TO_ALL:
            return self._received(node)
        if node.target == WAIT:
            return self._ids.get(argument(node))
        if node.target not in _MOVE_DATA or not all(source in self._ids for source in node.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._ids.__getitem__)
        assert callable(node.target)
        ids: Tensor = node.target(*args, **kwargs)
        return ids

    def _constant(self, value: Any) -> Tensor | None:
        is_read = isinstance(value, Tensor) and value.dtype in _INTEGERS and value.device.type == "cpu"
        if not is_read or value.numel() > _MAX_NUMBERS:
            return None
        return torch.tensor([self._id(number) for number in value.reshape(-1).tolist()], device="cpu").view(
            value.shape
        )

    def _received(self, launch: fx.Node) -> Tensor | None:
        splits: Any = launch.args[1]
        if argument(launch) not in self._ids or not _are_numbers(splits) or not _are_numbers(launch.args[2]):
            return None
        return torch.tensor(
            [self._id(Received(launch, rank, index)) for rank, size in enumerate(splits) for index in range(size)],
            dtype=torch.int64,
            device="cpu",
        )

    def _id(self, number: Size | Received) -> int:
        key: Any = number if isinstance(number, Received) else size_expression(number)
        key = int(key) if getattr(key, "is_Integer", False) else key
        if key not in self._id_of:
            self._id_of[key] = len(self.all_numbers)
            self.all_numbers.append(number)
        return self._id_of[key]


_INTEGERS = (torch.int64, torch.int32)


def _are_numbers(splits: Any) -> bool:
    return isinstance(splits, Sequence) and all(isinstance(size, int) for size in splits)
