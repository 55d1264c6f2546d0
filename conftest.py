"""What all tests have: names for docstring examples, and markers that are checked.

- Examples in docstrings have the names of their module, and those that :func:`_names_of_examples` adds.
- A test marked ``gpu`` runs where there is a CUDA device.
- A test marked ``multiprocess`` may start ranks, with ``run_ranks`` or ``torch.distributed.run``; others may not. The
  ranks of ``run_ranks`` are forked from a process that has imported all modules with such tests, and has captured
  a step.
- A test marked ``slow`` may take ten seconds of a core, as those may that start ranks; others that did are listed
  at the end.
- ``--quick`` leaves both out, and takes the first case alone of each test with several.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest

# Read when torch is imported, here and in all processes that tests start: several of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more would start processes that import torch

import torch
import torch.distributed as dist
from torch import nn

import graphpasses
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.roomy_stack import with_roomy_stack

# Modules that name what may not be there can then not be imported, and so not be searched for examples.
_NEEDS = {
    "graphpasses/embedding/model_parallel.py": "torchrec",
    "graphpasses/embedding/planner.py": "torchrec",
    "graphpasses/ops/_tree_kernel.py": "triton",
}
collect_ignore = [path for path, library in _NEEDS.items() if find_spec(library) is None]


MAX_SECONDS = 10.0  # on a quiet machine no test without a marker takes five
_CORE_SECONDS = "core seconds"  # a property of tests' reports, which reach the process that prints from all others
_START = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leaves out what takes long: see conftest.py")


@pytest.fixture(scope="session", autouse=True)
def _names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(
        torch=torch, dist=dist, nn=nn, graphpasses=graphpasses, fake_process_group=fake_process_group
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick", default=False):
        left_out = _leave_out(items)
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if isinstance(item, pytest.Function):
            item.obj = with_roomy_stack(item.obj)
        if isinstance(item, pytest.DoctestItem) and "embedding" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # TorchRec warns of its own defaults
    needs_torchrec = re.compile("torchrec|fbgemm|update_rows|FuseTableUpdates")
    for item in [] if find_spec("torchrec") else items:
        if isinstance(item, pytest.DoctestItem) and needs_torchrec.search(item.dtest.docstring or ""):
            item.add_marker(pytest.mark.skip(reason="TorchRec is not installed"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # Files that start ranks take longest: two workers that begin with them end together.
    with_ranks = {item.path for item in items if item.get_closest_marker("multiprocess")}
    items.sort(key=lambda item: item.path not in with_ranks)


def _leave_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Removes what ``--quick`` leaves out from a list, and returns it."""
    kept: dict[str, pytest.Item] = {}
    left_out = []
    for item in items:
        has_time = item.get_closest_marker("multiprocess") or item.get_closest_marker("slow")
        if has_time or kept.setdefault(item.nodeid.partition("[")[0], item) is not item:
            left_out.append(item)
    items[:] = kept.values()
    return left_out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Covers fixtures, too: those of a module are set up by its first test."""
    if item.get_closest_marker("multiprocess"):
        _start_fork_server(item.session)
        return (yield)
    if not item.get_closest_marker("slow"):
        item.stash[_START] = _core_seconds()

    def refuse(*args: Any) -> None:
        pytest.fail(f"{item.nodeid} starts ranks; mark it with @pytest.mark.multiprocess")

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *others: Any, **options: Any) -> None:
            if "torch.distributed.run" in args:
                refuse()
            super().__init__(args, *others, **options)

    with mock.patch.object(BaseProcess, "start", refuse), mock.patch.object(subprocess, "Popen", Popen):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if _START in item.stash:
        item.user_properties.append((_CORE_SECONDS, _core_seconds() - item.stash[_START]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists tests to be marked ``slow``: no failures, since how long a test takes is up to the machine, too."""
    seconds = {
        report.nodeid: dict(report.user_properties).get(_CORE_SECONDS, 0.0)
        for report in terminalreporter.getreports("")
    }
    if slow := sorted(nodeid for nodeid, each in seconds.items() if each > MAX_SECONDS):
        terminalreporter.section("make these faster, or mark them with @pytest.mark.slow")
        for nodeid in slow:
            terminalreporter.line(f"{seconds[nodeid]:.0f} s {nodeid}")


def _core_seconds() -> float:
    """What this process has taken of a core, and those that it started and that have ended."""
    return sum(os.times()[:4])


@functools.cache
def _start_fork_server(session: pytest.Session) -> None:
    """Imports once what ranks need, which ``run_ranks`` forks from one server, the first that was started."""
    tests = {item.module.__name__ for item in session.items if item.get_closest_marker("multiprocess")}
    compiler = ("torch._inductor.compile_fx", "graphpasses.capture.torch_compile")
    # What torchtitan and TorchRec import; torchtitan itself must not be imported before a rank says where it runs,
    # nor datasets before it says where they are kept.
    slow = (
        "aiohttp",
        "fsspec",
        "multiprocess",
        "pandas",
        "pyarrow.dataset",
        "requests",
        "spmd_types",
        "torch.distributed.pipelining.schedules",
        "torch.export._trace",
        "torch.utils.tensorboard",
        "torchdata.stateful_dataloader",
        "transformers.modeling_utils",
        "tyro",
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*sorted(tests), *compiler, *slow, "tests.helpers.warm"]
    )
    forkserver.ensure_running()


@pytest.fixture
def forget_compiled_code() -> None:
    """Lets Dynamo know nothing of the tests before."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _examples_begin_anew(request: pytest.FixtureRequest) -> None:
    """Lets Dynamo forget the sizes of other models with the same layers: a dim that varied once varies in all."""
    if isinstance(request.node, pytest.DoctestItem) and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _names_of_groups() -> Iterator[None]:
    """Lets the next world have the name that DTensor's caches know it by: torch counts worlds that failed, too."""
    yield
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
