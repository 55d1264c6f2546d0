"""Patches go in when the first thread enters and out when the last one leaves."""

from __future__ import annotations

import colorsys
import threading
from typing import Any

import pytest

from graphpasses._torch.patching import Patch, PatchSet

ORIGINAL = colorsys.rgb_to_hsv


def swapped(original: Any) -> Any:
    return lambda r, g, b: original(b, g, r)


def added(original: None) -> Any:
    assert original is None
    return lambda: 1


def patch_set() -> PatchSet:
    return PatchSet(Patch("colorsys:rgb_to_hsv", swapped), Patch("colorsys:new", added))


def test_patches_come_and_go() -> None:
    patches = patch_set()
    for _ in range(2):
        with patches:
            assert colorsys.rgb_to_hsv(0, 0, 1) == ORIGINAL(1, 0, 0)
            assert colorsys.new() == 1
            with patches:
                pass
            assert colorsys.rgb_to_hsv is not ORIGINAL
        assert colorsys.rgb_to_hsv is ORIGINAL
        assert not hasattr(colorsys, "new")


def test_patches_go_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), patch_set():
        raise ZeroDivisionError
    assert colorsys.rgb_to_hsv is ORIGINAL


def test_static_methods_stay_static() -> None:
    class Holder:
        @staticmethod
        def double(number: int) -> int:
            return 2 * number

    colorsys.Holder = Holder
    try:
        with PatchSet(Patch("colorsys:Holder.double", lambda original: lambda number: original(number) + 1)):
            assert Holder.double(3) == Holder().double(3) == 7
        assert Holder.double(3) == 6
    finally:
        del colorsys.Holder


def test_what_a_user_patched_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = patch_set()
    with patches:
        pass

    def other(r: float, g: float, b: float) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0)

    monkeypatch.setattr(colorsys, "rgb_to_hsv", other)
    with patches:
        pass
    assert colorsys.rgb_to_hsv is other


def test_threads_share_the_patches() -> None:
    patches = patch_set()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with patches:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with patches:
        pass
    assert colorsys.rgb_to_hsv is not ORIGINAL
    leave.set()
    thread.join()
    assert colorsys.rgb_to_hsv is ORIGINAL


def test_patches_that_do_not_fit_change_nothing() -> None:
    def refuse() -> None:
        raise LookupError

    patches = PatchSet(Patch("colorsys:rgb_to_hsv", swapped), check=refuse)
    for _ in range(2):
        with pytest.raises(LookupError), patches:
            pass
    assert colorsys.rgb_to_hsv is ORIGINAL
