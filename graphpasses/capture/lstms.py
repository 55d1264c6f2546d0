"""LSTMs of sizes that vary, traced as eager runs them in oneDNN: torch's C++ asks there for a number of elements.

Source: ``aten/src/ATen/native/mkldnn/RNN.cpp``, ``mkldnn_rnn``; when eager takes it, ``use_mkldnn`` of ``RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.backends import mkldnn

_is_available: Any = mkldnn.is_available  # torch has no types
_LSTM = 2  # oneDNN's number for it
_DTYPES = (torch.float32, torch.bfloat16)


def varies_in_onednn(value: Any, states: Any, params: Any, *_: Any) -> bool:
    """Whether ``torch.lstm`` is given sizes that vary, and runs in oneDNN in eager; not for packed sequences."""
    if not isinstance(states, (tuple, list)) or not (_is_available() and mkldnn.enabled):
        return False
    tensors = [value, *states, *params]
    is_on_cpu = all(each.device.type == "cpu" for each in tensors)
    has_projections = states[0].shape[2] != states[1].shape[2]
    varies = any(isinstance(size, torch.SymInt) for each in (value, *states) for size in each.shape)
    return varies and is_on_cpu and not has_projections and value.dtype in _DTYPES


def lstm_in_onednn(
    value: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Calls what ``torch.lstm`` calls, with its arguments."""
    value = (value.transpose(0, 1) if batch_first else value).contiguous()
    hidden, cell = (each.contiguous() for each in states)
    num_weights = 4 if has_biases else 2
    options = _LSTM, hidden.shape[2], num_layers, has_biases, bidirectional, batch_first, train
    ends: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for reverse in (False, True) if bidirectional else (False,):
            index = len(ends)
            state = hidden.select(0, index), cell.select(0, index)
            weights = [*params[index * num_weights : (index + 1) * num_weights]]
            if not has_biases:  # C++ makes the last argument first
                weights += [_zeros(each) for each in reversed(weights)][::-1]
            call = torch.ops.aten.mkldnn_rnn_layer.default
            output, *end, _ = call(value, *weights, *state, reverse, [], *options)
            outputs.append(output)
            ends.append((end[0], end[1]))
        value = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            value = torch.dropout(value, dropout, True)
    hidden, cell = (torch.stack(each) for each in zip(*ends, strict=True))
    return value.transpose(0, 1) if batch_first else value, hidden, cell


def _zeros(like: torch.Tensor) -> torch.Tensor:
    options = {"dtype": like.dtype, "layout": like.layout, "device": like.device}
    zeros: torch.Tensor = torch.ops.aten.zeros.default(like.shape, **options)
    return zeros
