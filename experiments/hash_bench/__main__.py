"""Command line: ``python -m experiments.hash_bench --help``."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
import tyro
from torch import Tensor

from experiments.harness.bench import Row, Step, time_rounds, timing_table
from graphpasses.parity import tensor_hash
from graphpasses.terminal import make_console

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def main(device: str = "cpu", mib: int = 64, rounds: int = 7) -> None:
    """Times graphpasses' tensor hash, and SHA-256 of the same bytes.

    Args:
        device: where the tensor is; SHA-256 then includes the copy to the host.
        mib: size of the tensor in MiB.
        rounds: counted rounds; the fastest gives the speed.
    """
    console = make_console()
    console.print(f"torch {torch.__version__}, device {device}, tensor of {mib} MiB, {rounds} rounds")
    num_threads = torch.get_num_threads()
    rows = []
    for dtype in _DTYPES:
        raw = torch.randint(0, 256, (mib * 2**20,), dtype=torch.uint8)
        tensor = raw.to(device).view(dtype)
        variants: dict[str, Step] = {"SHA-256": partial(_sha256, tensor)}
        for num in sorted({1, num_threads}):
            variants[f"graphpasses, {num} thread{'s' * (num > 1)}"] = partial(_hash, tensor, num)
        for name, timing in time_rounds(variants, rounds).items():
            speed = tensor.nbytes / timing.fastest / 1e9
            rows.append(Row(str(dtype).removeprefix("torch."), name, timing, (f"{speed:.2f}",)))
    console.print(timing_table("Hashes of one tensor", rows, ["GB/s"]))

    small = torch.randn(1000, device=device)
    timing = time_rounds({"small": partial(_hash, small, num_threads)}, 300)["small"]
    console.print(f"one tensor of 1000 elements: {timing.median * 1e6:.0f} µs")


def _hash(tensor: Tensor, num_threads: int, index: int) -> None:
    torch.set_num_threads(num_threads)
    tensor_hash(tensor)  # returns text, so the device is done when it returns


def _sha256(tensor: Tensor, index: int) -> None:
    """What one would do instead: copy the bytes to the host and hash them there."""
    hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().data).hexdigest()


if __name__ == "__main__":
    tyro.cli(main)
