"""TorchRec's own tests with compiled models: ``python -m experiments.torchrec_support.upstream --help``."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import tyro

import graphpasses as gp
from experiments.harness.outcome import Outcome, Outcomes
from experiments.harness.select import Only
from experiments.torchrec_support.upstream_sources import Compiling, load_tests, set_environment
from graphpasses.errors import GraphPassesError

__all__ = ["main"]

# Forked ranks have imported all tests already.
_FORK = multiprocessing.get_context("fork")


def main(
    sources: tyro.conf.Positional[Path],
    out: Path = Path("out/torchrec_upstream.jsonl"),
    only: Only = "",
    examples: int = 2,
    max_ranks: int = 4,
    timeout: float = 600.0,
) -> int:
    """Runs TorchRec's own multi-rank tests on gloo, each model compiled; what fails is run once more, uncompiled.

    Most of these tests try several examples of their arguments; each that launches ranks is counted. They need the
    package hypothesis. Exit code 1 if an example fails that passes in eager.

    Args:
        sources: a checkout of TorchRec's sources, of the version that is installed.
        out: file of the outcomes, a line each; tests of which something stands there are not run again.
        only: run only the tests whose name contains this.
        examples: how many of each test, at most.
        max_ranks: examples with more ranks are not run.
        timeout: seconds for an example.
    """
    warnings.simplefilter("ignore")
    out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(out)
    known = {name.rpartition(" #")[0] for name in outcomes.read()}
    for test in load_tests(sources):
        name = ".".join(test.id().split(".")[-3:])
        if only in name and name not in known:
            for number, outcome in enumerate(_run(test, _Limits(examples, max_ranks, timeout))):
                outcomes.add(f"{name} #{number}", outcome)
                print(f"{name} #{number}: {outcome.kind} {outcome.detail}", flush=True)
    found = outcomes.read()
    print(
        *(f"{count} {kind}" for kind, count in Counter(o.kind for o in found.values()).most_common()),
        sep="\n",
    )
    return int(any(outcome.is_bad for outcome in found.values()))


@dataclass(frozen=True)
class _Limits:
    examples: int
    max_ranks: int
    timeout: float


def _run(test: unittest.TestCase, limits: _Limits) -> list[Outcome]:
    """Runs a test; returns what came of each example, or of the test itself if it launches no ranks."""
    launches, found = _run_once(test, limits, is_compiled=True)
    if not launches and found[0].kind == "fails":
        _, (eager,) = _run_once(test, limits, is_compiled=False)
        return [Outcome("eager cannot", eager.detail)] if eager.kind == "fails" else found
    return found


def _run_once(test: unittest.TestCase, limits: _Limits, *, is_compiled: bool) -> tuple[bool, list[Outcome]]:
    """Runs a test in a process of its own, for it changes settings; returns whether it launched ranks, too."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_test_main, args=(test, limits, is_compiled, sender))
    process.start()
    sender.close()
    try:
        answer: tuple[bool, list[Outcome]] = receiver.recv()
    except EOFError:
        answer = False, [Outcome("fails", "its process died")]
    process.join()
    return answer


class _Raised(unittest.TestResult):
    """Keeps what a test raises."""

    error: Exception | None = None

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802  unittest names it
        self.error = err[1]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802  as the one above
        self.error = err[1]


def _test_main(test: unittest.TestCase, limits: _Limits, is_compiled: bool, sender: Connection) -> None:
    found: list[Outcome] = []
    report = gp.CompileReport()
    compiling = Compiling(report, is_on=is_compiled)

    def launch(self: unittest.TestCase, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any) -> None:
        if len(found) == limits.examples:
            return
        if world_size > limits.max_ranks:
            found.append(Outcome("not run", f"{world_size} ranks"))
            return
        calls = [partial(callable, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]
        found.append(_compare(calls, compiling, report, limits.timeout))

    base = sys.modules["torchrec.distributed.test_utils.multi_process"].MultiProcessTestBase
    result = _Raised()
    with _quietly(), mock.patch.object(base, "_run_multi_process_test", launch), _on_gloo():
        with compiling.entered():
            test.run(result)
    if found:
        sender.send((True, found))
    elif result.skipped:
        sender.send((False, [Outcome("not run", result.skipped[0][1])]))
    else:
        sender.send((False, [_outcome(result.error, report)]))
    os._exit(0)


def _compare(
    calls: list[Callable[[], None]], compiling: Compiling, report: gp.CompileReport, timeout: float
) -> Outcome:
    compiled = _launch(calls, compiling, report, timeout)
    if compiled.kind != "fails":
        return compiled
    compiling.is_on = False
    eager = _launch(calls, compiling, report, timeout)
    compiling.is_on = True
    return Outcome("eager cannot", eager.detail) if eager.kind == "fails" else compiled


def _launch(
    calls: list[Callable[[], None]], compiling: Compiling, report: gp.CompileReport, timeout: float
) -> Outcome:
    """Runs each call in a process of its own; all end when one fails."""
    set_environment()
    pipes = [_FORK.Pipe(duplex=False) for _ in calls]
    processes = [
        _FORK.Process(target=_rank_main, args=(call, report, sender), daemon=True)
        for call, (_, sender) in zip(calls, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _collect([receiver for receiver, _ in pipes], timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(receivers: list[Connection], timeout: float) -> Outcome:
    waiting, end, last = list(receivers), time.monotonic() + timeout, Outcome("fails", "no rank answered")
    while waiting:
        ready: list[Any] = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            return Outcome("fails", f"ran longer than {timeout:g} s")
        for receiver in ready:
            waiting.remove(receiver)
            try:
                last = receiver.recv()
            except EOFError:
                return Outcome("fails", "a rank died")
            if last.kind != "passed":
                return last
    return last


def _rank_main(call: Callable[[], None], report: gp.CompileReport, sender: Connection) -> None:
    import numpy
    import torch

    torch.set_num_threads(1)
    for seed in (random.seed, torch.manual_seed, numpy.random.seed):
        seed(0)
    failure = None
    try:
        call()
    except Exception as error:
        failure = error
    sender.send(_outcome(failure, report))
    os._exit(0)  # torch's threads of a rank whose others have failed would wait


def _outcome(failure: Exception | None, report: gp.CompileReport) -> Outcome:
    if isinstance(failure, unittest.SkipTest):
        return Outcome("not run", str(failure))
    if failure is not None:
        return _failure(failure)
    return Outcome("passed", "" if report.num_graphs else "compiles nothing")


def _failure(error: Exception) -> Outcome:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, GraphPassesError):
            return Outcome("refused", f"{type(chain).__name__}: {chain}".splitlines()[0][:300])
        chain = chain.__cause__ or chain.__context__
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return Outcome("fails", f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})")


@contextmanager
def _on_gloo() -> Iterator[None]:
    """Runs what TorchRec runs on GPUs on gloo."""
    context = sys.modules["torchrec.distributed.test_utils.multi_process"].MultiProcessContext
    skip, init = unittest.TestCase.skipTest, context.__init__

    def skip_test(self: unittest.TestCase, reason: str) -> None:
        if "NCCL not supported on CPUs" not in reason:
            skip(self, reason)

    def init_on_gloo(self: Any, rank: int, world_size: int, backend: str, *args: Any, **kwargs: Any) -> None:
        init(self, rank, world_size, "gloo", *args, **kwargs)

    with mock.patch.object(unittest.TestCase, "skipTest", skip_test):
        with mock.patch.object(context, "__init__", init_on_gloo):
            yield


@contextmanager
def _quietly() -> Iterator[None]:
    """What a test prints goes nowhere."""
    with tempfile.TemporaryFile("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        yield


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
