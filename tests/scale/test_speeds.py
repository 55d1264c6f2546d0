"""The file of speeds: what it gives, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpasses.errors import TopologyError
from graphpasses.scale import Speeds, read_speeds
from graphpasses.simulate import Hardware


def read(tmp_path: Path, text: str) -> Speeds:
    path = tmp_path / "speeds.toml"
    path.write_text(text)
    return read_speeds(path)


def test_what_is_left_out_is_assumed(tmp_path: Path) -> None:
    text = """
        ranks = [64, 1024]
        inter_latency = 9
        algorithms = ["ring", "nccl"]
        param_dtype = "float32"
        [hardware]
        nccl_version = "2.28"
        nvls = false
        cpu = "amd"
    """
    speeds = read(tmp_path, text)
    hardware = Hardware(nccl_version="2.28", nvls=False, cpu="amd")
    assert speeds == Speeds(
        ranks=(64, 1024),
        inter_latency=9.0,
        algorithms=("ring", "nccl"),
        param_dtype="float32",
        hardware=hardware,
    )
    assert "intra_latency 3.4 µs" in speeds.assumed
    assert "hardware.compute_capability 90" in speeds.assumed
    assert not any(each.startswith(("inter_latency", "hardware.cpu")) for each in speeds.assumed)
    assert read(tmp_path, "") == Speeds()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks = 8", "ranks is 8; it must be a list of integers"),
        ("ranks = [8, 12.5]", "ranks is [8, 12.5]; it must be a list of integers"),
        (
            "ranks = [12]",
            "ranks has 12, which fills no nodes of 8 GPUs; take multiples of gpus_per_node, or fewer ranks than it",
        ),
        ("ranks = []", "ranks is empty; name at least one"),
        ("gpus_per_node = 0", "gpus_per_node is 0; it must be above 0"),
        ("gpus_per_node = true", "gpus_per_node is True; it must be an integer"),
        ("inter_latency = -1", "inter_latency is -1; it must be 0 or above"),
        ("inter_latency = nan", "inter_latency is nan; it must be 0 or above"),
        ("inter_bandwidth = 0.0", "inter_bandwidth is 0.0; it must be above 0"),
        ('inter_bandwidth = "50"', "inter_bandwidth is '50'; it must be a number"),
        (
            "inter_latancy = 1",
            "there is no field inter_latancy; did you mean 'inter_latency' or 'intra_latency'?",
        ),
        (
            'algorithms = ["star"]',
            'algorithms has "star"; it must be of nccl, ring, tree, hierarchical',
        ),
        ('param_dtype = "half16"', 'param_dtype is "half16"; it must be a torch dtype such as "bfloat16"'),
        ("hardware = 3", "hardware is 3; it must be a table, [hardware]"),
        ("[hardware]\nlog = 3", "there is no field hardware.log"),
        ("[hardware]\nnvls = 1", "hardware.nvls is 1; it must be true or false"),
        ('[hardware]\ncpu = "arm"', 'cpu is "arm"; it must be "intel" or "amd"'),
    ],
)
def test_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as error:
        read(tmp_path, text)
    assert str(error.value) == f"'{tmp_path / 'speeds.toml'}': {message}"


def test_no_file_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"^cannot read '.*missing.toml': No such file or directory$"):
        read_speeds(tmp_path / "missing.toml")
    with pytest.raises(TopologyError, match=r"^'.*speeds.toml' is no TOML: Expected '=' after a key"):
        read(tmp_path, "ranks 8")
