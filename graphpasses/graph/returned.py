"""What a step returns: its loss, or that and other values, as ``loss_fn`` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graphpasses.errors import CaptureError
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.kinds import GraphOutput, OutputKind
from graphpasses.state.patterns import COMPUTED


def loss_of(result: Any) -> Any:
    """Returns the loss of what ``loss_fn`` returns: all of it, its ``loss``, or the first of a tuple; else None."""
    if isinstance(result, Mapping):
        return result.get("loss")
    if not isinstance(result, torch.Tensor) and hasattr(result, "loss"):
        return result.loss
    return next(iter(result), None) if isinstance(result, (tuple, list)) else result


@dataclass(frozen=True)
class Returned:
    """How a step's loss and the other values that it returns are nested."""

    structure: BatchStructure = field(default_factory=partial(BatchStructure, "result"))
    losses: tuple[str, ...] = ("result",)  # the paths of the loss in it
    plain: Mapping[str, Any] = field(default_factory=dict)  # the values that are not computed, by path

    @classmethod
    def of(cls, result: Any) -> tuple[Returned, list[Any]]:
        """Reads what ``loss_fn`` returns; also returns what is computed beside the loss."""
        structure, leaves, losses = _opened(result)
        plain = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, COMPUTED)}
        for path, leaf in leaves.items():
            if isinstance(leaf, DTensor):
                raise CaptureError(f"loss_fn returns {path}, a DTensor; return this rank's part, .to_local()")
            if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
                raise CaptureError(f"loss_fn returns {path}, a sparse tensor; return it dense, .to_dense()")
        returned = cls(structure, losses, plain)
        return returned, [leaves[path] for path in returned.computed]

    @classmethod
    def values_of(cls, result: Any) -> dict[str, Any]:
        """Returns the loss, as ``"loss"``, and the other values of what a step, or ``loss_fn``, returns, by path."""
        _, leaves, losses = _opened(result)
        return {"loss" if path in losses else path: leaf for path, leaf in leaves.items()}

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """The paths of what is computed beside the loss."""
        others = {*self.losses, *self.plain}
        return tuple(path for path in self.structure.paths if path not in others)

    def made_of(self, outputs: Sequence[GraphOutput], flat: Sequence[Any]) -> Any:
        """Returns what ``loss_fn`` would, of the flat outputs of a graph."""
        loss = next(value for item, value in zip(outputs, flat, strict=True) if item.is_loss)
        if self.structure.kind is None:
            return loss
        named = zip(outputs, flat, strict=True)
        computed = {item.fqn: value for item, value in named if item.kind is OutputKind.RETURNED}
        values = {**self.plain, **computed, **dict.fromkeys(self.losses, loss)}
        return self.structure.build([values[path] for path in self.structure.paths])


def _opened(result: Any) -> tuple[BatchStructure, dict[str, Any], tuple[str, ...]]:
    """Returns how a result is nested, its leaves by path, and the paths of the loss."""
    structure, loss = BatchStructure.of(result, path="result", advice=_RETURN_TENSORS), loss_of(result)
    leaves = dict(zip(structure.paths, structure.leaves(result), strict=True))
    return structure, leaves, tuple(path for path, leaf in leaves.items() if leaf is loss)


_RETURN_TENSORS = (
    "a captured step returns tensors, numbers, strings and None, in lists, tuples, dicts and dataclasses. Leave out "
    "other objects; of Hugging Face's models set use_cache=False"
)
