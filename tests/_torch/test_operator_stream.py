"""What operators keep for their backward and do not write everywhere has no digest: memory was something before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpasses._torch.recorded_operator import Operator
from graphpasses.parity.record_operators import operators_recorded


def without_digest(found: list[Operator]) -> list[tuple[str, str]]:
    return [
        (call.operator, value.name)
        for call in found
        for value in (*call.inputs, *call.outputs)
        if value.digest is None
    ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_lstm() -> None:
    model, found = nn.LSTM(4, 4), list[Operator]()
    with operators_recorded(model, found.append):
        model(torch.ones(3, 2, 4))[0].sum().backward()
    forward, backward = "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"
    assert without_digest(found) == [(forward, "result 3"), (backward, "workspace")]


def test_ctc_loss() -> None:
    scores, labels = torch.zeros(5, 2, 4, requires_grad=True), torch.ones(2, 3, dtype=torch.long)
    found: list[Operator] = []
    with operators_recorded(nn.Identity(), found.append):
        functional.ctc_loss(scores, labels, torch.tensor([5, 5]), torch.tensor([3, 1])).backward()
    names = [name for operator, name in without_digest(found) if "ctc_loss" in operator]
    assert names == ["result 1", "log_alpha"]
