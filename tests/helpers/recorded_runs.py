"""A short run that is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpasses.parity import ParityRecorder


def record(path: Path, num_steps: int = 3, **options: Any) -> nn.Linear:
    """Trains a layer and records each step; ``options`` are those of the recorder. Returns the layer."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ParityRecorder(path, **options) as recorder:
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            recorder.record(step, loss, model)
    return model
