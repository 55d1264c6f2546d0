"""What was found out about kernels on this machine: kept on disk, beside what Inductor compiled."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from graphpasses._torch import exact_kernels
from graphpasses._torch.exact_kernels import cache_folder, compiler_version
from graphpasses.source_digest import digest_of_sources


def read_kept(name: str) -> dict[str, bool]:
    """Returns what was found out under a name, by this version of all that it depends on."""
    path = _path(name)
    found: dict[str, bool] = json.loads(path.read_text()) if path.exists() else {}
    return found


def keep(name: str, found: Mapping[str, bool]) -> None:
    """Adds what was found out; of processes that do so at once the last one's stays."""
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps({**read_kept(name), **found}))
    own.replace(path)


def _path(name: str) -> Path:
    on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return cache_folder() / name / f"{_digest(on_cuda)}.json"


@functools.cache
def _digest(on_cuda: bool) -> str:
    """Returns a digest of what was compared depends on: torch, compilers, the processor, the GPU, our own code."""
    parts = [torch.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.cpu.get_capabilities())]
    parts += [compiler_version(), inspect.getsource(exact_kernels), digest_of_sources(str(Path(__file__).parent))]
    if on_cuda:
        parts += [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability()), str(torch.version.cuda)]
        parts.append(importlib.metadata.version("triton"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
