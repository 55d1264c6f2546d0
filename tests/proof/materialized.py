"""Computes from the number of a value what the value is, given inputs: what axioms say, as data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpasses.proof.core.values import Value, Values


def materialized(values: Values, value: Value, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the tensor that a value says it is; ``inputs`` are those of the sources ``("input", name)``."""
    assert value.dtype is not None
    assert value.shape is not None
    assert value.pieces is not None
    result = torch.empty(value.numel, dtype=value.dtype)
    written = torch.zeros(value.numel, dtype=torch.int32)
    for piece in value.pieces:
        sizes = [size for size, _, _ in piece.dims]
        place = [step for _, step, _ in piece.dims]
        read = [step for _, _, step in piece.dims]
        data = _data(values, piece.source, inputs)
        torch.as_strided(result, sizes, place, piece.start).copy_(
            torch.as_strided(data, sizes, read, piece.offset)
        )
        torch.as_strided(written, sizes, place, piece.start).add_(1)
    assert (written == 1).all()
    return result.reshape(value.shape)


def _data(values: Values, source: int, inputs: dict[str, Tensor]) -> Tensor:
    key: Any = values.key(source)
    match key[0]:
        case "input":
            return inputs[key[1]].reshape(-1)
        case "constant":
            return torch.full((1,), float(key[2]) if key[3] is None else key[3], dtype=key[1])
        case "cast":
            return _data(values, key[3], inputs).to(key[2])
        case "div" | "mul":
            function = torch.div if key[0] == "div" else torch.mul
            return function(_data(values, key[5], inputs), key[4])
        case "neg":
            return -_data(values, key[2], inputs)
        case "sum" | "product":
            return _combined(key[0], *(_data(values, source, inputs) for source in key[2:]))
        case "sum of tensors" | "product of tensors":
            operands = [materialized(values, values[number], inputs) for number in key[1:]]
            return _combined(key[0], *operands).reshape(-1)
        case "bytes":
            return _data(values, key[2], inputs).contiguous().view(torch.uint8)
    raise AssertionError(key)


def _combined(name: str, x: Tensor, y: Tensor) -> Tensor:
    return x + y if name.startswith("sum") else x * y
