"""Python is asked which functions run, and whoever asked before goes on."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.state.calls import calls_watched, names_of, stored_names

X = torch.ones(2, 4)


def called() -> int:
    numbers = [1]
    return numbers[0]


class Debugger:
    """Sees calls and lines of one function; ``is_compiled`` sets itself again at each call, as coverage does."""

    def __init__(self, is_compiled: bool) -> None:
        self.seen: list[tuple[str, str]] = []
        self._is_compiled = is_compiled

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._is_compiled and event == "call":
            sys.settrace(self)
        if frame.f_code is called.__code__:
            self.seen.append((event, frame.f_code.co_name))
        return self


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_debugger_goes_on(is_compiled: bool) -> None:
    before, debugger, names = sys.gettrace(), Debugger(is_compiled), []
    sys.settrace(debugger)
    try:
        with calls_watched(lambda frame: names.append(frame.f_code.co_name)):
            called()
            called()
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert names.count("called") == 2
    lines = [("call", "called"), ("line", "called"), ("line", "called"), ("return", "called")]
    assert debugger.seen == 2 * lines


def test_a_debugger_goes_on_in_a_capture() -> None:
    before, debugger = sys.gettrace(), Debugger(is_compiled=False)
    sys.settrace(debugger)
    try:
        capture_train_step(
            lambda model, x: model(x).mean() * called(), nn.Linear(4, 1), X, check=False, recapture=False
        )
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert ("line", "called") in debugger.seen


def test_nobody_is_asked_after_an_error() -> None:
    def refuse(frame: FrameType) -> None:
        raise ValueError("refused")

    before = sys.gettrace()
    with pytest.raises(ValueError, match="refused"), calls_watched(refuse):
        called()
    assert sys.gettrace() is before


def test_names_of_code() -> None:
    def code(value: Any) -> Any:
        import math

        value.written = getattr(value, "a.b", SCALE) + math.pi
        return lambda: value.inner

    names = names_of(code.__code__)
    assert names.globals == {"getattr", "SCALE"}
    assert names.attributes == {"code", "written", "pi", "a", "b"}
    assert (names.optional, names.imports) == ({"a", "b"}, {"math"})


SCALE = 1.0


class Caching(nn.Module):
    """Keeps a mask for each length; ``terms`` are another's: the control."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.masks: dict[int, torch.Tensor] = {}
        self.terms: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1)
        scales = torch.ones(1)
        scales[0] = 2
        return self.linear(x) * self.masks[len(x)] * scales + sum(self.terms.values())


def test_what_code_gives_items() -> None:
    def puts(by: dict[str, int], other: dict[str, int]) -> None:
        by.setdefault("key", other["key"])

    assert stored_names(Caching.forward.__code__) == {"masks", "scales"}
    assert stored_names(puts.__code__) == {"by"}
    assert not stored_names(called.__code__)


def test_a_cache_may_get_more() -> None:
    model = Caching()
    model(X)
    step = capture_train_step(lambda model, x: model(x).mean(), model, X, recapture=False)
    model(torch.ones(3, 4))
    step.check(X)
    model.terms["one"] = torch.ones(1)
    with pytest.raises(CaptureError, match=r"\"terms\['one'\]\" was absent"):
        step(X)
