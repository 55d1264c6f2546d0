"""TorchRec's own tests of DistributedModelParallel, those that run on CPU, with ours in its place.

They need hypothesis and the sources of the release, of which the installed package lacks a part::

    git clone --branch v1.8.0-rc1 https://github.com/meta-pytorch/torchrec /tmp/torchrec
    pip install hypothesis
    TORCHREC_SOURCES=/tmp/torchrec python -m pytest tests/embedding/torchrec/test_torchrec_suite.py
"""

from __future__ import annotations

import io
import os
import unittest
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from graphpasses.parity.launch import run_ranks

SOURCES = os.environ.get("TORCHREC_SOURCES", "")


def run_suite(sources: str, *, ours: bool) -> tuple[int, dict[str, str]]:
    """Returns how many tests passed, and what is said of the others."""
    import torchrec.distributed

    torchrec.distributed.__path__.append(str(Path(sources) / "torchrec" / "distributed"))
    from torchrec.distributed.test_utils import test_model_parallel_base as base

    if ours:
        from graphpasses.embedding import DistributedModelParallel

        base.DistributedModelParallel = DistributedModelParallel

    class StateDict(base.ModelParallelStateDictBase):
        backend = "gloo"

    class SparseOnly(base.ModelParallelSparseOnlyBase):
        backend = "gloo"

    dist.destroy_process_group()  # each test makes its own
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    suite = unittest.TestSuite([load(StateDict), load(SparseOnly)])
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    others = {
        case.id().rpartition(".")[2]: text for case, text in (*result.failures, *result.errors, *result.skipped)
    }
    return result.testsRun - len(others), others


@pytest.mark.multiprocess
@pytest.mark.skipif(not SOURCES, reason="TORCHREC_SOURCES names no checkout of TorchRec")
def test_torchrec_suite() -> None:
    pytest.importorskip("hypothesis")
    (theirs,), (ours,) = (run_ranks(partial(run_suite, SOURCES, ours=is_ours), 1) for is_ours in (False, True))
    num_passed, others = ours
    assert ours == theirs
    assert num_passed > 0
    assert all(text.startswith("Not enough GPUs") for text in others.values()), others
