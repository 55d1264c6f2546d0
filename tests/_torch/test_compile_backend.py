"""A backend stands around each call of what it compiled, and torch stays as it is."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame, lookup_backend

import graphpasses
from graphpasses._torch.compile_backend import Backend
from graphpasses.capture.torch_compile import graphpasses as backend

CONTEXTS = (eval_frame._TorchDynamoContext, eval_frame.OptimizeContext)
CALLS = [context.__call__ for context in CONTEXTS]
OPTIONS = {"inner": "aot_eager"}


@pytest.fixture(autouse=True)
def _torch_stays() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert [context.__call__ for context in CONTEXTS] == CALLS


def is_wrapped(compiled: Any) -> bool:
    return "_wrap.<locals>.call" in compiled.__code__.co_qualname


def test_nothing_is_replaced_before_or_after() -> None:
    code = """
import torch
from torch._dynamo import eval_frame, lookup_backend
contexts = eval_frame._TorchDynamoContext, eval_frame.OptimizeContext
calls = [context.__call__ for context in contexts]
def check():
    assert [context.__call__ for context in contexts] == calls
import graphpasses, graphpasses.capture.torch_compile, graphpasses.embedding.torchrec.tracing_scope
check()
assert "graphpasses" in torch._dynamo.list_backends()
check()
for _ in range(2):
    compiled = torch.compile(torch.nn.Linear(4, 2), backend="graphpasses", options={"inner": "aot_eager"})
    check()
    compiled(torch.ones(3, 4)).sum().backward()
    check()
    assert "graphpasses" in torch._dynamo.list_backends()
    check()
print(type(compiled.dynamo_ctx).__module__, compiled.forward.__code__.co_qualname)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "graphpasses._torch.compile_backend _wrap.<locals>.call\n", done.stderr


def test_by_name_by_object_modules_and_functions() -> None:
    for _ in range(2):
        assert is_wrapped(torch.compile(nn.Linear(4, 2), backend="graphpasses", options=OPTIONS).forward)
        assert is_wrapped(torch.compile(lambda x: x + 1, backend="graphpasses", options=OPTIONS))
        assert is_wrapped(graphpasses.compile(nn.Linear(4, 2)).forward)
        assert is_wrapped(graphpasses.compile(lambda x: x + 1))


def test_other_backends_are_left_alone() -> None:
    compiled = torch.compile(nn.Linear(4, 2), backend="eager")
    assert type(compiled.dynamo_ctx) is eval_frame.OptimizeContext
    assert not is_wrapped(compiled.forward)


def test_a_lookup_that_compiles_nothing_lasts_until_the_next_compilation() -> None:
    assert lookup_backend("graphpasses") is backend
    assert eval_frame.OptimizeContext.__call__ is not CALLS[1]
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert not is_wrapped(compiled)


def test_a_copy_of_a_compiled_module_is_wrapped_too() -> None:
    compiled = graphpasses.compile(nn.Linear(4, 2), inner="aot_eager")
    copied = copy.deepcopy(compiled)
    assert is_wrapped(copied.forward)
    x = torch.ones(3, 4)
    assert torch.equal(copied(x), compiled(x))
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_threads_compile_at_once() -> None:
    barrier = threading.Barrier(8)
    compiled: list[Any] = []

    def compile_many(index: int) -> None:
        barrier.wait()
        for _ in range(20):
            name = "eager" if index % 2 else "graphpasses"
            compiled.append((name, torch.compile(lambda x: x + 1, backend=name)))

    threads = [threading.Thread(target=compile_many, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 160
    assert all(is_wrapped(function) == (name == "graphpasses") for name, function in compiled)


def test_every_traced_function_has_its_context() -> None:
    entered: list[str] = []

    class Entered:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    traced = Backend(lambda graph, inputs: graph.forward, lambda root, compiled, _: compiled, Entered)
    with traced.expected():
        double = torch.compile(lambda x: 2 * x, backend=traced)
    assert not entered
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert entered == ["in", "out"]
