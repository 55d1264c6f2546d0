"""Resident memory of this process; Linux."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["forget_peak", "peak_resident", "resident"]


def resident() -> int:
    """Returns the bytes that are resident now."""
    return _bytes("VmRSS")


def peak_resident() -> int:
    """Returns the bytes that were resident at most, since the process began or :func:`forget_peak` was called.

    Example:
        >>> forget_peak()
        >>> peak_resident() >= resident()
        True
    """
    return _bytes("VmHWM")


def forget_peak() -> None:
    """Makes what is resident now the peak (``clear_refs`` in ``man 5 proc``)."""
    Path("/proc/self/clear_refs").write_text("5")


def _bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
