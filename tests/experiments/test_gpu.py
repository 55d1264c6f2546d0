"""The checks for GPUs: what they skip, call wrong, and write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from experiments.gpu import __main__ as command
from experiments.gpu import ranks
from experiments.gpu.hashes import hashes
from experiments.gpu.result import Check, Result, SkippedError
from experiments.gpu.steps import cuda_graphs


def fail(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    raise ValueError("no such thing\nand more")


def skip(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    raise SkippedError("needs a moon")


def wrong(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    return False, [("a|b", f"{device}, {num_steps}")]


@pytest.mark.parametrize(
    ("check", "status", "reason"),
    [
        (wrong, "WRONG", ""),
        (skip, "skipped", "needs a moon"),
        (fail, "failed", "ValueError: no such thing"),
    ],
)
def test_status(check: object, status: str, reason: str) -> None:
    result = command._run(Check("mine", check), "cpu", 4)
    assert (result.status, result.reason) == (status, reason)
    assert Result.from_json(result.to_json()) == result


def test_page() -> None:
    results = [
        Result("mine", "ok", found=(("a|b", "c"),), seconds=2.4),
        Result("other", "skipped", "needs a moon"),
    ]
    page = command._page(results, "cpu", 25)
    assert page.startswith("# Not run on a GPU: what a CPU shows of it\n")
    assert "| mine | ok | 2 |\n| other | skipped: needs a moon | 0 |\n" in page
    assert page.endswith("## Mine\n\n| | |\n|---|---|\n| a\\|b | c |\n")


def test_what_a_cpu_cannot_do_is_skipped() -> None:
    with pytest.raises(SkippedError, match="CUDA graphs need a CUDA device"):
        cuda_graphs("cpu", 4)


def test_ranks_on_one_device_add_as_nccl() -> None:
    ranks.register_backend("cpu")
    dist.init_process_group("nccl_sim_host", rank=0, world_size=1, store=dist.HashStore())
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x.tolist() == [1, 1]


@pytest.mark.slow
def test_hashes() -> None:
    is_right, found = hashes("cpu", 4)
    assert is_right
    assert found[:2] == [("as on the CPU", "10 of 10 dtypes"), ("control, one bit", "10 of 10 dtypes differ")]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--steps", "3"], "--steps must be at least 4"),
        (
            ["--only", "moon"],
            "no check contains 'moon'; there are: captured step against eager FSDP2, one rank,",
        ),
    ):
        with pytest.raises(SystemExit):
            command.main([*arguments, "--out", str(tmp_path / "out.md")])
        assert message in capsys.readouterr().err
