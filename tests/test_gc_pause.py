"""The garbage collector is as it was after it was paused."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from torch import nn

from graphpasses import gc_pause
from graphpasses.capture import capture_train_step
from graphpasses.gc_pause import objects_made_in_pause, paused_gc
from graphpasses.graph import TrainGraph
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline


@pytest.fixture(params=[True, False])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_it_is_as_it_was(is_enabled: bool) -> None:
    with paused_gc():
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is is_enabled
    with pytest.raises(ZeroDivisionError), paused_gc():
        raise ZeroDivisionError
    assert gc.isenabled() is is_enabled


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_what_the_block_makes_is_old() -> None:
    gc.collect()
    with paused_gc():
        made = [Cycle() for _ in range(3)]
    assert [each for each in gc.get_objects(generation=2) if type(each) is Cycle] == made
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        with paused_gc():
            made.append(Cycle())
        assert gc.get_freeze_count()  # still out of the collector's sight
    finally:
        gc.unfreeze()


def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts as many objects as it has."""
    counted, collector = [], SimpleNamespace(**vars(gc))
    collector.get_freeze_count = lambda: counted.append(7) or 7
    monkeypatch.setattr(gc_pause, "gc", collector)
    monkeypatch.setattr(gc_pause, "_OLD", gc_pause._OldObjects())
    for _ in range(3):
        with paused_gc():
            pass
    assert counted == [7]
    gc.collect()
    with paused_gc():
        pass
    assert counted == [7, 7]


def test_what_was_made_in_a_pause_is_found() -> None:
    old = Cycle()
    gc.collect()

    def found() -> list[Cycle]:
        return [each for each in objects_made_in_pause() if type(each) is Cycle]

    with paused_gc():
        made = Cycle()
        assert found() == [made]
        gc.collect()  # what it has looked at is old, too
        assert made in found()
    assert {old, made} <= {*found()}


@pytest.mark.slow
def test_garbage_of_many_blocks_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "_MAX_ADDED", 10_000)
    gc.collect()
    most, alive = 0, WeakSet[Cycle]()
    for _ in range(5):
        with paused_gc():
            for _ in range(3_000):
                alive.add(Cycle())
        most = max(most, len(alive))
    assert 3_000 <= most <= 10_000


class Look(GraphPass):
    name = "look"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        graph.note(f"the collector is {'on' if gc.isenabled() else 'off'}")
        return 0


def test_it_is_paused_while_passes_run_and_code_is_generated(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(3, 2), torch.ones(4, 3))
    step = Pipeline((Look(),)).run(captured)
    assert gc.isenabled() is is_enabled
    assert step.report is not None
    assert step.report["look"].notes == ("the collector is off",)
    seen: list[bool] = []
    compile_code = torch.fx.graph_module._forward_from_src
    monkeypatch.setattr(
        torch.fx.graph_module,
        "_forward_from_src",
        lambda *args: seen.append(gc.isenabled()) or compile_code(*args),
    )
    step(torch.ones(4, 3))
    assert seen == [False]
    assert gc.isenabled() is is_enabled


def test_who_times_the_collector_is_not_the_step_s_code() -> None:
    seconds = [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        seconds[0] += time.process_time()

    model, x = nn.Linear(4, 1), torch.ones(3, 4)
    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(20)
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        step = capture_train_step(lambda model, x: model(x).square().mean(), model, x, optimizer=optimizer)
        step(x)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert seconds[0] > 0
