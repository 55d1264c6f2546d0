"""Only tests that say so start ranks or take long."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    path = str(Path(__file__).parents[1] / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    return next(each for each in plugins if getattr(each, "__file__", None) == path)


def test_ranks_need_the_marker() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"test_ranks_need_the_marker starts ranks; mark it with"):
        multiprocessing.get_context("spawn").Process().start()
    with pytest.raises(pytest.fail.Exception, match="starts ranks"):
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--help"], check=True)


@pytest.mark.multiprocess
def test_ranks_with_the_marker() -> None:
    process = multiprocessing.get_context("spawn").Process(target=str)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_other_tests_have_ten_seconds(
    conftest: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tear_down() -> None:
        hook = conftest.pytest_runtest_teardown(request.node)
        next(hook)
        hook.send(None)

    start = request.node.stash[conftest._START]
    for seconds in (9.0, 11.0):
        monkeypatch.setattr(conftest, "_core_seconds", lambda seconds=seconds: start + seconds)
        with pytest.raises(StopIteration if seconds < 10 else pytest.fail.Exception) as caught:
            tear_down()
    assert "test_other_tests_have_ten_seconds takes 11 s; make it faster, or mark it with" in str(caught.value)
    monkeypatch.undo()


@pytest.mark.slow
def test_slow_tests_have_as_long_as_they_take(conftest: Any, request: pytest.FixtureRequest) -> None:
    assert conftest._START not in request.node.stash


def test_quick_takes_the_first_case_of_unmarked_tests(conftest: Any) -> None:
    marker_of = {
        "a.py::ranks": "multiprocess",
        "a.py::cases[0]": "",
        "a.py::cases[1]": "",
        "b.py::cases[1]": "",
        "b.py::long[0]": "slow",
    }
    items = [SimpleNamespace(nodeid=nodeid, get_closest_marker=marker.__eq__) for nodeid, marker in marker_of.items()]
    left_out = conftest._leave_out(items)
    assert [each.nodeid for each in items] == ["a.py::cases[0]", "b.py::cases[1]"]
    assert [each.nodeid for each in left_out] == ["a.py::ranks", "a.py::cases[1]", "b.py::long[0]"]
