"""Computes from the number of a value what the value is, given inputs: what axioms say, as data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpasses.proof.core.values import Value, Values
from graphpasses.proof.terms import KINDS


def materialized(values: Values, value: Value, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the tensor that a value says it is; ``inputs`` are those of the sources ``("input", name)``."""
    assert value.dtype is not None
    assert value.shape is not None
    assert value.pieces is not None
    device = next(iter(inputs.values())).device
    result = torch.empty(value.numel, dtype=value.dtype, device=device)
    written = torch.zeros(value.numel, dtype=torch.int32, device=device)
    for piece in value.pieces:
        sizes = [size for size, _, _ in piece.dims]
        place = [step for _, step, _ in piece.dims]
        read = [step for _, _, step in piece.dims]
        data = _data(values, piece.source, inputs)
        torch.as_strided(result, sizes, place, piece.start).copy_(torch.as_strided(data, sizes, read, piece.offset))
        torch.as_strided(written, sizes, place, piece.start).add_(1)
    assert (written == 1).all()
    return result.reshape(value.shape)


def _data(values: Values, source: int, inputs: dict[str, Tensor]) -> Tensor:
    key: Any = values.key(source)
    match key[0]:
        case "input":
            return inputs[key[1]].reshape(-1)
        case "row":  # of an input, of which ``inputs`` has one row
            return _data(values, key[1], inputs)
        case "constant":
            number, (device, *_) = (
                float(key[2]) if key[3] is None else key[3],
                (each.device for each in inputs.values()),
            )
            return torch.full((1,), number, dtype=key[1], device=device)
        case "tensor":
            return materialized(values, values[key.parameters[0]], inputs).reshape(-1)
        case kind:
            operands = [_data(values, source, inputs) for source in key.operands]
            return KINDS[kind].compute(*operands, *key.parameters)
