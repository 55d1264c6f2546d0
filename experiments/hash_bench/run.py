"""Speed of graphpasses' tensor hash against SHA-256 of the same bytes; see README.md."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable

import torch

from graphpasses.parity import tensor_hash


def gigabytes_per_second(call: Callable[[], object], num_bytes: int, num_repeats: int, device: str) -> float:
    """Times the best of several calls, after one that warms up."""
    times = []
    for _ in range(1 + num_repeats):
        if device != "cpu":
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        call()  # returns a string, so the work is done when it returns
        times.append(time.perf_counter() - begin)
    return num_bytes / min(times[1:]) / 1e9


def sha256(tensor: torch.Tensor) -> str:
    """What one would do instead: copy the bytes to the host and hash them there."""
    return hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor in MiB")
    parser.add_argument("--num-repeats", type=int, default=7)
    options = parser.parse_args()

    default = torch.get_num_threads()
    size = f"{options.mib} MiB, best of {options.num_repeats}"
    print(f"torch {torch.__version__}, device {options.device}, tensor of {size}")
    print(f"| GB/s | graphpasses, 1 thread | graphpasses, {default} threads | SHA-256 |")
    print("|---|---:|---:|---:|")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        numel = options.mib * 2**20 // dtype.itemsize
        tensor = (
            torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).to(options.device).view(dtype)
        )
        speeds = []
        for num_threads in (1, default):
            torch.set_num_threads(num_threads)
            speeds.append(
                gigabytes_per_second(
                    lambda t=tensor: tensor_hash(t), tensor.nbytes, options.num_repeats, options.device
                )
            )
        speeds.append(
            gigabytes_per_second(
                lambda t=tensor: sha256(t), tensor.nbytes, options.num_repeats, options.device
            )
        )
        print(
            f"| {str(dtype).removeprefix('torch.')} | "
            + " | ".join(f"{speed:.2f}" for speed in speeds)
            + " |"
        )

    torch.set_num_threads(default)
    small = torch.randn(1000, device=options.device)
    begin = time.perf_counter()
    for _ in range(300):
        tensor_hash(small)
    print(f"\none tensor of 1000 elements: {(time.perf_counter() - begin) / 300 * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
