"""TorchRec's jagged and keyed tensors in a batch, recognized by their names: TorchRec need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["fields_of", "held_items", "is_taken", "items_by", "reject_reason"]

_FIELDS = {
    "KeyedJaggedTensor": (
        "._values",
        "._weights",
        "._lengths",
        "._offsets",
        "._stride_per_key_per_rank",
        "._inverse_indices",
    ),
    "JaggedTensor": ("._values", "._weights", "._lengths", "._offsets"),
}
_TAKEN = ("KeyedJaggedTensor", "JaggedTensor", "KeyedTensor")


def is_taken(kind: type) -> bool:
    """Whether values of a class are containers of tensors whose first dim may vary from step to step."""
    return _is_torchrecs(kind) and kind.__name__ in _TAKEN


def _is_torchrecs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torchrec"


def fields_of(kind: type) -> Sequence[str] | None:
    """Returns what a jagged tensor is made of, in order, as paths name it; None for another class."""
    return _FIELDS.get(kind.__name__) if is_taken(kind) else None


def held_items(value: Any, items: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Returns the items of a container without those that a jagged tensor does not have, and with its lengths.

    Of offsets alone, a key-jagged tensor asks for ``len``, which would fix their number.
    """
    if fields_of(type(value)) is None:
        return items
    is_keyed = type(value).__name__ == "KeyedJaggedTensor"
    return {
        key: value.lengths() if is_keyed and key == "._lengths" else item
        for key, item in items.items()
        if item is not None or (is_keyed and key == "._lengths")
    }


def items_by(value: Any, items: Mapping[Any, Any], keys: Sequence[Any]) -> Mapping[Any, Any]:
    """Returns the items of a container; of a jagged tensor lengths and offsets as another of its structure has them.

    It is made of either, and computes the other when it is asked. ``keys`` are those that the other has.
    """
    if fields_of(type(value)) is None:
        return items
    computed = {"._lengths": value.lengths, "._offsets": value.offsets}
    own = {key: item for key, item in items.items() if key in keys or key not in computed}
    return own | {key: make() for key, make in computed.items() if key in keys and key not in items}


def reject_reason(value: Any) -> str | None:
    """Returns why a captured step does not take a value of TorchRec as eager does; None if it does, or it is another.

    A step takes a container apart to its tensors and makes it again of them: what else it holds would be lost.
    """
    kind = type(value)
    if not _is_torchrecs(kind):
        return None
    if not is_taken(kind):
        return f"is TorchRec's {kind.__name__}; a captured step takes {', '.join(_TAKEN)}. Give those that it holds"
    if kind.__name__ == "KeyedTensor":
        return None if value.key_dim() == 1 else "has another key_dim than 1; transpose its values"
    if kind.__name__ == "JaggedTensor":
        return None
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
            f"was made with stride={value.stride()}, and has {num} lengths for {num_keys} keys: a "
            f"captured step takes "
            "the number of samples from the lengths. Leave stride out"
        )
    return None
