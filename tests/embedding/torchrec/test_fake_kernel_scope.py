"""FBGEMM's fake kernels are there while something compiles, and only then."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

pytest.importorskip("fbgemm_gpu")

import graphpasses
from graphpasses._torch.schemas import has_kernel
from graphpasses.capture.compile_options import Inner
from graphpasses.embedding.torchrec.fake_kernels import fake_kernels, fake_kernels_if_loaded
from graphpasses.fbgemm.names import load_fbgemm
from tests.helpers.kept import two_tables

NAME = "fbgemm::permute_sequence_embeddings"
HIDDEN = "fbgemm::index_select_dim0"


def is_there() -> bool:
    op = torch.ops.fbgemm.index_select_dim0.default
    found = {has_kernel(NAME, "Meta"), torch.DispatchKey.AutogradCPU in op.py_kernels}
    assert len(found) == 1
    return found.pop()


def test_blocks_nest_and_threads_share_them() -> None:
    load_fbgemm()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with fake_kernels():
            entered.set()
            leave.wait(10)

    assert not is_there()
    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(10)
    with fake_kernels_if_loaded():
        with fake_kernels() as names:
            assert NAME in names
        leave.set()
        thread.join()
        assert is_there()
    assert not is_there()
    with fake_kernels() as again:
        assert again == names


def test_a_block_that_began_without_fbgemm_keeps_what_a_pass_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "fbgemm_gpu")
        scope = fake_kernels_if_loaded()
        scope.__enter__()
    assert not is_there()
    with fake_kernels():
        pass
    assert is_there()
    scope.__exit__(None, None, None)
    assert not is_there()


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = two_tables("EXACT_SGD")
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.tables(ids.clone(), offsets.clone())).mean()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_runs_and_compiles_again_without_them(
    inner: Inner,
) -> None:
    torch._dynamo.reset()
    eager, model = Tables(), Tables()
    compiled = graphpasses.compile(model, inner=inner, fullgraph=True)
    for offsets in ([0, 2, 3, 3, 6], [0, 2, 3, 3, 6], [0, 2, 3, 3, 4, 5, 6, 6, 6]):
        ids = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(0))
        for call in (eager, compiled):
            call(ids, torch.tensor(offsets)).backward()
        assert not is_there()
    assert all(map(torch.equal, eager.state_dict().values(), model.state_dict().values()))
