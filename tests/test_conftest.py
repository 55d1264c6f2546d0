"""Only tests that say so start ranks."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest


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
