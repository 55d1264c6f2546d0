"""Hashes on the device: the same as on the CPU, and how fast."""

from __future__ import annotations

import torch

from experiments.harness.bench import time_rounds
from graphpasses.parity import tensor_hash

__all__ = ["hashes"]

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


def hashes(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Hashes of all dtypes on the device against those on the CPU, with one bit changed as the control; GB/s."""
    same = other = 0
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24_000,), dtype=torch.uint8, generator=generator)
        tensor = raw.view(dtype)
        changed = raw.clone()
        changed[-1] ^= 1
        same += tensor_hash(tensor.to(device)) == tensor_hash(tensor)
        other += tensor_hash(changed.view(dtype).to(device)) != tensor_hash(tensor)
    found = [
        ("as on the CPU", f"{same} of {len(_DTYPES)} dtypes"),
        ("control, one bit", f"{other} of {len(_DTYPES)} dtypes differ"),
    ]
    mib = 512 if device == "cuda" else 32
    for dtype in (torch.float32, torch.bfloat16):
        large = torch.randint(0, 256, (mib * 2**20,), dtype=torch.uint8, device=device).view(dtype)
        timing = time_rounds({"hash": lambda index, large=large: tensor_hash(large)}, 3)["hash"]
        found.append(
            (
                str(dtype).removeprefix("torch."),
                f"{large.nbytes / timing.fastest / 1e9:.2f} GB/s of {mib} MiB",
            )
        )
    return same == other == len(_DTYPES), found
