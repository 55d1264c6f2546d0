"""A backend stands around each call of what it compiled, and other backends are left to torch."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo import eval_frame

import graphpasses
from graphpasses._torch.compile_backend import Backend
from graphpasses.capture.torch_compile import graphpasses as backend

OPTIONS = {"inner": "aot_eager"}


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    torch._dynamo.reset()


def is_wrapped(compiled: Any) -> bool:
    return "_wrap.<locals>.call" in compiled.__code__.co_qualname


@pytest.mark.slow
def test_nothing_is_replaced_before_it_is_wanted() -> None:
    code = """
import torch
from torch._dynamo import eval_frame
contexts = eval_frame._TorchDynamoContext, eval_frame.OptimizeContext
calls = [context.__call__ for context in contexts]
def changed():
    return [context.__call__ is not call for context, call in zip(contexts, calls)]
import graphpasses, graphpasses.embedding.torchrec.model_call
assert "graphpasses" in torch._dynamo.list_backends()
assert not any(changed())
for _ in range(2):
    compiled = torch.compile(torch.nn.Linear(4, 2), backend="graphpasses", options={"inner": "aot_eager"})
    compiled(torch.ones(3, 4)).sum().backward()
print(changed(), compiled.forward.__code__.co_qualname)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[False, True] _wrap.<locals>.call\n", done.stderr


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
    double = torch.compile(lambda x: 2 * x, backend=traced)
    assert not entered
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert entered == ["in", "out"]


class Doubled(nn.Linear):
    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 2 * x
        if self.is_broken:
            torch._dynamo.graph_break()
        return super().forward(x)


class Broken(Doubled):
    is_broken = True


@torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=4)
@pytest.mark.parametrize("kind", [Doubled, Broken])
def test_every_instance_is_compiled_and_freed(kind: type[Doubled]) -> None:
    graphs: list[str] = []
    compiling: list[nn.Module] = []

    def keep(graph: fx.GraphModule, inputs: object) -> Any:
        (model,) = compiling
        graphs.append(graph.code)
        return lambda *args: (model, graph.forward(*args))[1]  # what is compiled may keep its model

    def freed(backend: Any) -> list[bool]:
        """Compiles, calls and drops instances of a class."""
        weights = []
        for _ in range(6):
            model = kind(4, 2)
            compiled = torch.compile(model, backend=backend)
            compiling.append(model)
            compiled(torch.ones(3, 4)).sum().backward()
            compiling.clear()
            weights.append(weakref.ref(model.weight))
        del model, compiled
        gc.collect()
        return [weight() is None for weight in weights]

    num_graphs = 2 if kind.is_broken else 1
    assert freed(Backend(keep, lambda root, compiled, _: compiled)) == [True] * 6
    assert len(graphs) == 6 * num_graphs
    graphs.clear()
    torch._dynamo.reset()
    assert freed(keep)[0] is False  # so it is without
    assert len(graphs) < 6 * num_graphs


def test_copies_are_compiled_for_themselves() -> None:
    compiled = graphpasses.compile(Doubled(4, 2), inner="aot_eager")
    x = torch.ones(3, 4)
    compiled(x)
    copied, pickled = copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))
    weight = weakref.ref(copied.weight)
    assert torch.equal(copied(x), compiled(x))
    assert torch.equal(pickled(x), compiled(x))
    del copied
    gc.collect()
    assert weight() is None
    with mock.patch.object(torch._dynamo.config, "error_on_recompile", True):
        compiled(x), pickled(x)  # they kept what is theirs


def test_the_garbage_collector_rests_while_dynamo_works() -> None:
    seen = []

    def compile_graph(module: fx.GraphModule, inputs: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise ZeroDivisionError
        return module.forward

    plain = Backend(compile_graph, lambda root, compiled, options: compiled)
    for is_enabled in (True, False):
        torch._dynamo.reset()
        (gc.enable if is_enabled else gc.disable)()
        try:
            compiled = torch.compile(nn.Linear(4, 2), backend=plain)
            with pytest.raises(Exception, match="ZeroDivisionError") if len(seen) == 1 else nullcontext():
                compiled(torch.ones(3, 4))
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()
    assert seen == [False, False]
