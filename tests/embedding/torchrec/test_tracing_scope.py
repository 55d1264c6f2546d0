"""The scope in which TorchRec models are traced, in one process: it undoes itself, is cheap and needs no TorchRec."""

from __future__ import annotations

import subprocess
import sys
import time
import timeit

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("torchrec")

from tests.helpers.recommenders import CPU, DIM, Compiled, Scored, bags, ids  # first: no warnings  # isort: skip

from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from graphpasses._torch.dynamo import record_graph_breaks
from graphpasses.embedding.torchrec.model_call import tracing_scope
from graphpasses.embedding.torchrec.patches import TORCHREC_PATCHES


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unsharded_tables_are_compiled_once(is_fused: bool, dtype: torch.dtype) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        tables = bags(2, poolings=[PoolingType.MEAN])
        if is_fused:
            configs = tables.embedding_bag_configs()
            tables = FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.1}, device=CPU)
        models.append(Scored(tables, 2 * DIM))
    eager, model = models
    compiled = Compiled(model)
    for step in range(4):
        for rank in range(2):
            losses = [call(ids(rank, step, 2, dtype=dtype)) for call in (eager, compiled)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
    assert compiled.backend.num_graphs == 1
    states = [
        [value for module in root.modules() for value in (*module._parameters.values(), *module._buffers.values())]
        for root in models
    ]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True) if pair[0] is not None)


def test_unsharded_tables_take_a_key_twice_as_in_eager() -> None:
    """Only sharded collections of bags check what they are given, in eager, too."""
    tables = bags(2)
    twice = KeyedJaggedTensor(["f0", "f1", "f1"], torch.tensor([0, 1, 2]), lengths=torch.ones(3, dtype=torch.long))
    compiled = Compiled(Scored(tables, 2 * DIM))
    assert torch.equal(compiled(twice), compiled.model(twice))


def test_scope_restores_everything() -> None:
    settings = torch._dynamo.config.get_config_copy()
    forward = DistributedDataParallel.forward

    def is_changed() -> bool:
        return DistributedDataParallel.forward is not forward and torch._dynamo.config.capture_scalar_outputs

    def fail() -> None:
        with tracing_scope():
            with tracing_scope():
                assert is_changed()
            assert is_changed()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert DistributedDataParallel.forward is forward
    assert torch._dynamo.config.get_config_copy() == settings


def test_scope_is_cheap() -> None:
    """It takes a few times what it takes to set as many functions of a class and back, however fast the machine."""

    class Owner(nn.Module):
        pass

    def set_by_hand() -> None:
        for _ in range(2 * len(TORCHREC_PATCHES.patches)):
            Owner.extra = len

    def enter() -> None:
        with tracing_scope():
            pass

    fastest = [
        min(timeit.repeat(function, number=1, repeat=200, timer=time.process_time))
        for function in (enter, enter, set_by_hand)  # the first call resolves what is patched
    ]
    assert fastest[1] < 20 * fastest[2]  # seven times as seen; to resolve the patches takes thousands


@pytest.mark.slow
def test_scope_needs_no_torchrec() -> None:
    code = """
import sys, torch
sys.modules["torchrec"] = None  # not installed
from graphpasses.embedding.torchrec.input_dists import needs_eager_call
from graphpasses.embedding.torchrec.inputs import check_inputs, prepare_inputs
from graphpasses.embedding.torchrec.patches import TORCHREC_PATCHES
from graphpasses.embedding.torchrec.model_call import tracing_scope
model = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=True)
assert not needs_eager_call([model])
check_inputs((torch.ones(2, 2),), {})
args, kwargs, _ = prepare_inputs((torch.ones(2, 2),), {})
with tracing_scope():
    print(model(*args, **kwargs).shape)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "torch.Size([2, 2])\n"


def test_graph_breaks_are_named_by_line() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(lambda x: breaks(x) * 2, backend="eager")
    with record_graph_breaks() as found:
        compiled(torch.ones(2))
    line = breaks.__code__.co_firstlineno + 1
    what = "Call to `torch._dynamo.graph_break()`. User-inserted graph break. Message: None"
    assert found == [f"{__file__}:{line} in breaks: {what}"]
