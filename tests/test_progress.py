"""The line that says what long work is doing."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch
from torch import nn

from graphpasses import capture_train_step, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, pause: float) -> str:
    """What a capture writes to a stream in the place of stderr."""
    monkeypatch.setattr(sys, "stderr", stream)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if pause:
            time.sleep(pause)  # time for the line to be drawn
        return model(x).sum()

    capture_train_step(loss_fn, nn.Linear(2, 2), torch.ones(1, 2), check=False)
    return stream.getvalue()


def test_a_terminal_shows_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    assert "graphpasses: traces loss_fn and its backward" in shown(monkeypatch, Terminal(), pause=0.4)


def test_nothing_is_shown_of_short_work_or_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), pause=0) == ""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert shown(monkeypatch, io.StringIO(), pause=0) == ""
