"""A digest of source code, for caches on disk that go by what the code was."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def digest_of_sources(folder: str) -> str:
    """Returns a digest of all Python files below a folder, as they were when it was first asked for."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
