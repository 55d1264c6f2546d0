"""Only tests that say so start ranks, and those that take long without saying so are listed."""

from __future__ import annotations

import contextlib
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


def test_others_that_take_ten_seconds_are_listed(conftest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def of(nodeid: str, *seconds: float) -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, user_properties=[(conftest._CORE_SECONDS, each) for each in seconds])

    def summary(*reports: SimpleNamespace) -> str:
        reporter = SimpleNamespace(getreports=lambda _: reports, section=print, line=print)
        conftest.pytest_terminal_summary(reporter)
        return capsys.readouterr().out

    assert not summary(of("a.py::short", 9.0), of("a.py::marked"))
    assert "11 s a.py::long" in summary(of("a.py::long", 11.0), of("a.py::short", 9.0))


def test_a_test_has_its_seconds(conftest: Any, request: pytest.FixtureRequest) -> None:
    with contextlib.closing(conftest.pytest_runtest_teardown(request.node)) as hook:
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(None)
    name, seconds = request.node.user_properties.pop()
    assert name == conftest._CORE_SECONDS
    assert 0 <= seconds < 10


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
