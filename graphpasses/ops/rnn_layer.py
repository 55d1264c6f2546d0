"""A layer of an LSTM as eager's oneDNN kernel computes it where gradients are on, in a graph, where they are off.

The kernel asks for that itself: without gradients it rounds otherwise, and keeps nothing for backward. Source:
``aten/src/ATen/native/mkldnn/RNN.cpp``, ``mkldnn_rnn_layer``.
"""

from __future__ import annotations

from typing import Any

import torch

from graphpasses.errors import BatchMismatchError
from graphpasses.ops.define import define_operator

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def _with_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    given = [each.detach() if isinstance(each, torch.Tensor) else each for each in args]
    with torch.enable_grad():
        results: tuple[torch.Tensor, ...] = _RNN_LAYER(*given)
    return results


def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    if args[0].numel() == 0:
        raise BatchMismatchError("an LSTM is given no elements, which oneDNN does not take; run that batch eagerly")
    return _with_gradients(*args)


RNN_LAYER = define_operator(
    "rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx, Tensor cx, "
    "bool reverse, SymInt[] batch_sizes, int mode, SymInt hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer,
    fake=_with_gradients,
)
"""``rnn_layer(Tensor input, ...) -> (Tensor, ...)``: as ``aten.mkldnn_rnn_layer`` with gradients on."""
