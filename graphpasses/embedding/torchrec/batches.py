"""TorchRec's jagged and keyed tensors in a batch, recognized by their names: TorchRec need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpasses.graph.batch_structure import Containers

_JAGGED = ("._values", "._weights", "._lengths", "._offsets")
_FIELDS = {"KeyedJaggedTensor": (*_JAGGED, "._stride_per_key_per_rank", "._inverse_indices"), "JaggedTensor": _JAGGED}
_TAKEN = ("KeyedJaggedTensor", "JaggedTensor", "KeyedTensor")


class _JaggedAndKeyed(Containers):
    """Jagged and keyed tensors; the first dim of what they are made of may vary from step to step."""

    def knows(self, kind: type) -> bool:
        return kind.__module__.partition(".")[0] == "torchrec"

    def fields_of(self, kind: type) -> Sequence[str] | None:
        """Returns what a jagged tensor is made of; None for a keyed tensor."""
        return _FIELDS.get(kind.__name__)

    def held_items(self, value: Any, items: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns the items that a jagged tensor has, and a key-jagged one's lengths: offsets fix their number."""
        if self.fields_of(type(value)) is None:
            return items
        is_keyed = type(value).__name__ == "KeyedJaggedTensor"
        return {
            key: value.lengths() if is_keyed and key == "._lengths" else item
            for key, item in items.items()
            if item is not None or (is_keyed and key == "._lengths")
        }

    def items_by(self, value: Any, items: Mapping[Any, Any], keys: Sequence[Any]) -> Mapping[Any, Any]:
        """Returns the items, of a jagged tensor with lengths and offsets as another of its structure has them."""
        if self.fields_of(type(value)) is None:
            return items
        computed = {"._lengths": value.lengths, "._offsets": value.offsets}
        own = {key: item for key, item in items.items() if key in keys or key not in computed}
        return own | {key: make() for key, make in computed.items() if key in keys and key not in items}

    def reject_reason(self, value: Any) -> str | None:
        """Returns why a captured step does not take a value as eager does; None if it does."""
        kind = type(value).__name__
        if kind not in _TAKEN:
            return f"is TorchRec's {kind}; a captured step takes {', '.join(_TAKEN)}. Give those that it holds"
        if kind == "KeyedTensor":
            return None if value.key_dim() == 1 else "has another key_dim than 1; transpose its values"
        return _reject_reason_of_keyed_jagged(value) if kind == "KeyedJaggedTensor" else None


TORCHREC = _JaggedAndKeyed()


def _reject_reason_of_keyed_jagged(value: Any) -> str | None:
    if value.variable_stride_per_key():
        return "has a number of samples for each key (VBE), which a captured step does not follow"
    if value.inverse_indices_or_none() is not None:
        return "has inverse_indices, which a captured step does not follow; make them an item of the batch"
    lengths, offsets = value.lengths_or_none(), value.offsets_or_none()
    num = 0 if lengths is None else lengths.numel()
    if offsets is not None:
        num = max(offsets.numel() - 1, 0)
    num_keys = len(value.keys())
    if num_keys and value.stride() * num_keys != num:
        return (
            f"was made with stride={value.stride()}, and has {num} lengths for {num_keys} keys: a captured step "
            "takes the number of samples from the lengths. Leave stride out"
        )
    return None
